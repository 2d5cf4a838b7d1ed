"""The events of each parser for replies, well-formed or not, however they are cut."""

from __future__ import annotations

import itertools
import json
import time
from functools import cache
from importlib.metadata import entry_points

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenspeed_parsers import harmony, thinking
from tokenspeed_testing.parser import TOOLS, Found, Parts, found, joined, read

from tokenspeed_core.api import ParserContext, ParserSpec

SPECS: dict[str, ParserSpec] = {
    f"{kind} {entry.name}": entry.load()
    for kind in ("tool", "reasoning")
    for entry in entry_points(group=f"tokenspeed.{kind}_parsers")
    if entry.value.startswith("tokenspeed_parsers:")
}
# The opening and closing text of every format, and texts that may break it.
SHREDS = (
    *("<tool_call>", "</tool_call>", "<tool", "_call>", "</", "<", ">", "<thi", "nk>", "\n", " "),
    *("<function=f>", "</function>", "<parameter=p>", "</parameter>", "<function=", "<parameter="),
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>"),
    *('<parameter name="p">', "<arg_key>", "p</arg_key>", "<arg_value>", "</arg_value>"),
    *("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">'),
    *("</｜DSML｜invoke>", '<｜DSML｜parameter name="p" string="false">', "</｜DSML｜parameter>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>f\n```json\n"),
    *("<｜tool▁sep｜>", "\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    *(
        "[TOOL_CALLS]",
        "[CALL_ID]",
        "abcdef123",
        "[ARGS]",
        "[f(p=",
        "'",
        "g()",
        ")]",
        "<|python_tag|>",
    ),
    *("<|python_start|>", "<|python_end|>", "<|channel|>analysis", "<|message|>", "<|end|>"),
    *(
        "<|start|>assistant",
        "<|channel|>commentary to=functions.f",
        "<|constrain|>json",
        "<|call|>",
    ),
    *('{"name": "f", "arguments": ', '{"name": "f", "parameters": {}}', '{"a": "', '"}'),
    *(
        '{"arguments": {"a": 1}, "name": "g"}',
        "{",
        "}",
        "}}",
        '"',
        "\\",
        '\\"',
        "\\u00e9",
        "[",
        "]",
    ),
    *(
        ",",
        ":",
        "(",
        ")",
        "=",
        "f",
        "p",
        "name",
        "1",
        "True",
        "null",
        "é",
        "🙂",
        "Hello.",
        "<think>",
    ),
    *("</think>", "§", "☂"),
)
SYMBOLS = "§☂"
texts = st.lists(st.sampled_from(SHREDS), max_size=30).map("".join)
ends = st.sampled_from(["", "<think>\n", "</think>\n\n", "assistant\n"])
FUNCTION_TYPES = {
    "p": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "s": {"type": "string"},
    "n": {"type": ["string", "null"]},
}
F = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": FUNCTION_TYPES}},
}
G = {"type": "function", "function": {"name": "g"}}
CONTEXT = ParserContext((*TOOLS, F, G))


def tool(name: str, text: str, context: ParserContext = CONTEXT) -> Found:
    return found(read(SPECS[f"tool {name}"], [text], context))


def say(spec: ParserSpec, text: str, context: ParserContext = CONTEXT) -> Parts:
    return joined(read(spec, [text] if text else [], context))


def cut(text: str, places: list[int]) -> list[str]:
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)]) if b > a]


@cache
def symbols_in(text: str) -> dict[str, int]:
    return {symbol: text.count(symbol) for symbol in SYMBOLS}


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=25, deadline=None)
@given(text=texts, data=st.data(), end=ends)
def test_no_text_is_lost_and_cuts_do_not_matter(
    name: str, text: str, data: st.DataObject, end: str
) -> None:
    context = ParserContext(CONTEXT.tools, end)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    whole = say(SPECS[name], text, context)
    assert joined(read(SPECS[name], cut(text, places), context)) == whole
    assert joined(read(SPECS[name], list(text), context)) == whole
    said = "".join(part for _, part in whole)
    for symbol, num in symbols_in(text).items():
        assert said.count(symbol) >= num, whole
    if name.startswith("tool ") and all(kind == "content" for kind, _ in whole):
        assert said == text


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=80), end=st.text(max_size=9))
def test_arbitrary_text_raises_no_exception(name: str, text: str, end: str) -> None:
    context = ParserContext(CONTEXT.tools, end)
    whole = say(SPECS[name], text, context)
    assert joined(read(SPECS[name], list(text), context)) == whole
    "".join(part for _, part in whole).encode(errors="surrogatepass")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "unit", [*"[{<\n'\"(=,", "<tool_call>", "[[TOOL_CALLS]", "[f(", '{"name": "f", ']
)
def test_long_malformed_replies_are_read_at_once(name: str, unit: str) -> None:
    text = unit * (60_000 // len(unit))
    begun = time.process_time()
    say(SPECS[name], text)
    assert time.process_time() - begun < 3


# Well-formed and broken calls, in the formats that models publish. Peers' tests have the same cases.
F1 = (("f", '{"p": 1}'),)
REPLIES: list[tuple[str, str, tuple[tuple[str, str], ...], str]] = [
    # parser, reply, calls, content
    ("hermes", '<tool_call>{"name": "f", "arguments": {"p": 1}}</tool_call>', F1, ""),
    ("hermes", '<tool_call>\n{ "name" : "f",\n"parameters": {"p": 1} }\n</tool_call>\n', F1, ""),
    ("hermes", '<tool_call>{"arguments": {"p": 1}, "name": "f"}</tool_call>', F1, ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"p\\": 1}"}</tool_call>', F1, ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', (("f", "{}"),), ""),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', (("f", "{}"),), ""),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"p": 1}}', F1, ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"p": 1}', F1, ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"p": 1}}\n</tool_c', F1, ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"p": "x', (("f", '{"p": "x'),), ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"p": 1</tool_call>ok', (("f", '{"p": 1'),), "ok"),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"p": "}</tool_call>\\"{"}}</tool_call>',
        (("f", '{"p": "}</tool_call>\\"{"}'),),
        "",
    ),
    (
        "qwen",
        'A.\n\n<tool_call>{"name": "f", "arguments": {"p": 1}}<tool_call>{"name": "g"}\nDone.',
        (*F1, ("g", "{}")),
        "A.Done.",
    ),
    ("qwen", "Write <tool_call> and be done.", (), "Write <tool_call> and be done."),
    ("qwen", "\n<tool_call>{bad}</tool_call>\n", (), "\n<tool_call>{bad}</tool_call>\n"),
    (
        "qwen",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        (),
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    ),
    ("qwen", '<tool_call>{"name": "", "arguments": {}}', (), '<tool_call>{"name": "", "arguments": {}}'),
    ("qwen", '<tool_call>{"name": "\\ud800"}', (), '<tool_call>{"name": "\\ud800"}'),
    (
        "qwen",
        '<tool_call>{"name": "f", "arguments": {"p": 1}} and more</tool_call>',
        F1,
        "and more",
    ),
    # --- qwen3_coder
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=p>\n1\n</parameter>\n<parameter=s>\na\nb\n\n</parameter>\n"
        "</function>\n</tool_call>",
        (("f", '{"p": 1, "s": "a\\nb\\n"}'),),
        "",
    ),
    ("qwen3_coder", "<function=f>\n<parameter=p>\n1\n</parameter>\n</function>", F1, ""),
    (
        "qwen3_coder",
        "Look:\n<tool_call>\n<function=f>\n<parameter=s>\nDallas\n<parameter=p>\n1\n</parameter>\n"
        "</function>\n</tool_call>",
        (("f", '{"s": "Dallas", "p": 1}'),),
        "Look:",
    ),
    ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>", (("g", "{}"),), ""),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=p>None</parameter><parameter=n>null</parameter></function>",
        (("f", '{"p": null, "n": null}'),),
        "",
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=p>many</parameter><parameter=n>nul</parameter></function>",
        (("f", '{"p": "many", "n": "nul"}'),),
        "",
    ),
    ("qwen3_coder", "I use <tool_call> tags.", (), "I use <tool_call> tags."),
    ("qwen3_coder", "<tool_call>\n<function=f", (), "<tool_call>\n<function=f"),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=s>cut",
        (("f", '{"s": "cut'),),
        "",
    ),
    # --- minimax_m2
    (
        "minimax_m2",
        'A. <minimax:tool_call><invoke name="f"><parameter name="p">1</parameter></invoke>'
        '<invoke name="unknown"><parameter name="days">5</parameter></invoke></minimax:tool_call>',
        (*F1, ("unknown", '{"days": "5"}')),
        "A. ",
    ),
    # --- deepseek_v4
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">1'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="x" string="false">[1, 2]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        (("f", '{"s": "1", "x": [1, 2]}'),),
        "",
    ),
    (
        "deepseek_v4",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>',
        (),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>',
    ),
    # --- glm45
    (
        "glm45",
        "<tool_call>f\n    <arg_key>s</arg_key>\n    <arg_value>TX</arg_value>\n    </tool_call>\n    "
        "<tool_call>g\n</tool_call>",
        (("f", '{"s": "TX"}'), ("g", "{}")),
        "",
    ),
    (
        "glm45",
        "<tool_call>calc<arg_key>a</arg_key><arg_value>42</arg_value><arg_key>b</arg_key>"
        "<arg_value>3.14</arg_value><arg_key>c</arg_key><arg_value>true</arg_value>"
        "<arg_key>d</arg_key><arg_value>add</arg_value></tool_call>",
        (("calc", '{"a": 42, "b": 3.14, "c": true, "d": "add"}'),),
        "",
    ),
    (
        "glm45",
        '<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>  "你好"\n🎉  </arg_value>\n</tool_call>',
        (("f", '{"s": "  \\"你好\\"\\n🎉  "}'),),
        "",
    ),
    ("glm45", "<tool_call></tool_call>", (), "<tool_call></tool_call>"),
    ("glm45", "<tool_call>   ", (), "<tool_call>   "),
    ("glm45", "Use <tool_call> for it.", (), "Use <tool_call> for it."),
    (
        "glm45",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n<arg_key>bad\n"
        "<arg_value>v</arg_value>\n</tool_call>",
        (("f", '{"s": "a", "bad": "v"}'),),
        "",
    ),
    # --- kimik2
    (
        "kimik2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0 <|tool_call_argument_begin|>"
        '{"p": 1} <|tool_call_end|><|tool_call_begin|>g:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|> After.",
        (*F1, ("g", "{}")),
        "After.",
    ),
    (
        "kimik2",
        "<|tool_calls_section_begin|> noise <|tool_call_begin|>f:0<|tool_call_argument_begin|>"
        '{"p": 1<|tool_call_end|><|tool_call_begin|>f:1<|tool_call_argument_begin|>{"p": "<div>',
        (("f", '{"p": 1'), ("f", '{"p": "<div>')),
        "<|tool_calls_section_begin|> noise ",
    ),
    (
        "kimik2",
        "<|tool_call_begin|>functions.invalid.0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        (),
        "<|tool_call_begin|>functions.invalid.0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    ("kimik2", "<|tool_calls_section_begin|><|tool_calls_section_end|>", (), "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    # --- deepseek_v3, deepseek_v31
    (
        "deepseek_v3",
        "A.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"p": "```\\n"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (("f", '{"p": "```\\n"}'),),
        "A.",
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"p": 1\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (("f", '{"p": 1\n```'),),
        "",
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n{"p": 1}\n```<｜tool▁calls▁end｜>',
        (),
        '<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n{"p": 1}\n```<｜tool▁calls▁end｜>',
    ),
    (
        "deepseek_v31",
        'text<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"p": 1}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"y":2}<｜tool▁call▁end｜><｜tool▁calls▁end｜> suffix',
        (*F1, ("g", '{"y":2}')),
        "textsuffix",
    ),
    (
        "deepseek_v31",
        "Let me.<｜tool▁calls▁begin｜>get_weather",
        (),
        "Let me.<｜tool▁calls▁begin｜>get_weather",
    ),
    # --- mistral
    ("mistral", '[TOOL_CALLS]  [ {"name":"f" , "arguments" : {"p": 1} } ]', F1, ""),
    ("mistral", '[TOOL_CALLS] [{"arguments":{"name": "J"}, "name": "f"}]', (("f", '{"name": "J"}'),), ""),
    (
        "mistral",
        'Hi[TOOL_CALLS] [{"name": "f", "arguments": {"p": 1}}, {"name": "g", "arguments": {}}]\nextra',
        (*F1, ("g", "{}")),
        "Hiextra",
    ),
    ("mistral", "[TOOL_CALLS] not json at all", (), "[TOOL_CALLS] not json at all"),
    ("mistral", "[TOOL_CALLS]name_no_args", (), "[TOOL_CALLS]name_no_args"),
    ("mistral", '[TOOL_CALLS]f{"p": 1}[TOOL_CALLS]g{}', (*F1, ("g", "{}")), ""),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"p": 1}', F1, ""),
    (
        "mistral",
        "hi{hi[TOOL_CALLS]bash{\"command\": \"print(\\\"x\\\")\\nre.compile(r'{}')",
        (("bash", "{\"command\": \"print(\\\"x\\\")\\nre.compile(r'{}')"),),
        "hi{hi",
    ),
    # --- json, llama3_json
    ("json", '\n[{"name": "f", "arguments": {"p": 1}}]', F1, ""),
    ("json", 'The call is {"name": "f", "parameters": {"p": 1}} Right?', F1, "The call is Right?"),
    ("json", '{"name": "delete_all", "parameters": {}}', (), '{"name": "delete_all", "parameters": {}}'),
    ("json", '{"name": "f"}', (), '{"name": "f"}'),
    ("json", '{"p": {"name": "f"}} [] {}', (), '{"p": {"name": "f"}} [] {}'),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"p": 1}} ; {"name": "g", "parameters": {}}',
        (*F1, ("g", "{}")),
        "",
    ),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"p": 1}} I used {f} with {"p": 1}',
        F1,
        'I used {f} with {"p": 1}',
    ),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"q": "test {v} [c]","n": {"i": "more {b}"}}}\n'
        '{"name": "g", "parameters": {}}',
        (("f", '{"q": "test {v} [c]","n": {"i": "more {b}"}}'), ("g", "{}")),
        "",
    ),
    # --- pythonic
    (
        "pythonic",
        "[f(name='John', age=37, address={'city': 'SF', 'n': -1.5}, role=None, ok=True, l=['J', ()],)]",
        (
            (
                "f",
                '{"name": "John", "age": 37, "address": {"city": "SF", "n": -1.5}, "role": null, '
                '"ok": true, "l": ["J", []]}',
            ),
        ),
        "",
    ),
    ("pythonic", "[f(), g(x=[], y={})]", (("f", "{}"), ("g", '{"x": [], "y": {}}')), ""),
    (
        "pythonic",
        r"""<|python_start|>[f(s='Martha\'s', n="\"cool\" \u00e9\x41")]<|python_end|>""",
        (("f", '{"s": "Martha\'s", "n": "\\"cool\\" éA"}'),),
        "",
    ),
    ("pythonic", "[f(x=1e999), g()]", (("f", '{"x": "1e999"}'), ("g", "{}")), ""),
    ("pythonic", "[other(x=1)] and [1, 2]", (), "[other(x=1)] and [1, 2]"),
    ("pythonic", "Look:\n[f(p=1)] Done.", F1, "Look:Done."),
    ("pythonic", "[f(p=1)])", F1, ")"),
    # --- gpt_oss
    (
        "gpt_oss",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\n\"p\": 1}<|call|>"
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|><|call|>",
        (("f", '{\n"p": 1}'), ("g", "{}")),
        "",
    ),
    ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>foo<|end|>", (("f", "foo"),), ""),
    ("gpt_oss", "<|channel|>final<|message|>Hi.", (), "<|channel|>final<|message|>Hi."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls", "content"), REPLIES)
def test_calls_are_found(
    name: str, text: str, calls: tuple[tuple[str, str], ...], content: str
) -> None:
    parts = tool(name, text)
    assert (parts.calls, parts.content) == (calls, content)


@pytest.mark.parametrize(
    ("name", "start", "more"),
    [
        ("qwen", '<tool_call>{"name": "f", "arguments": {"s": "lo', "ng"),
        ("qwen3_coder", "<tool_call><function=f><parameter=s>lo", "ng"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="s">lo', "ng"),
        (
            "deepseek_v4",
            '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="s" string="true">lo',
            "ng",
        ),
        ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>lo", "ng"),
        ("kimik2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"s": "lo', "ng"),
        ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "lo', "ng"),
        ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "lo', "ng"),
        ("mistral", '[TOOL_CALLS]f{"s": "lo', "ng"),
        ("llama3_json", '{"name": "f", "parameters": {"s": "lo', "ng"),
        ("json", '[{"name": "f", "parameters": {"s": "lo', "ng"),
        ("pythonic", "[f(s='lo", "ng"),
        ("gpt_oss", '<|channel|>commentary to=functions.f<|message|>{"s": "lo', "ng"),
    ],
)
def test_arguments_are_streamed(name: str, start: str, more: str) -> None:
    parser = SPECS[f"tool {name}"].make(CONTEXT)
    events = parser.feed(start)
    assert [event.kind for event in events] == ["call", "arguments"]
    assert [event.text for event in parser.feed(more)] == [more]


def test_call_ids_of_the_model_are_kept() -> None:
    kimi = tool("kimik2", "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}")
    assert kimi.call_ids == ("functions.f:7",)
    mistral = tool("mistral", "[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{}[TOOL_CALLS]g{}")
    assert mistral.call_ids[0] == "abcdef123"
    listed = tool("mistral", '[TOOL_CALLS][{"id": "ABCdef123", "name": "f", "arguments": {}}]')
    assert listed.call_ids == ("ABCdef123",)
    assert len(mistral.call_ids[1]) == 9
    assert mistral.call_ids[1].isalnum()
    assert tool("qwen", '<tool_call>{"name": "f"}</tool_call>').call_ids == ("",)


def test_kimi_counter_names_the_only_tool() -> None:
    text = "<|tool_call_begin|>0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert tool("kimik2", text, ParserContext((F,))).calls == (("f", "{}"),)
    assert tool("kimik2", text).calls == ()


def test_types_follow_references_of_the_schema() -> None:
    parameters = {
        "properties": {"u": {"$ref": "#/$defs/Unit"}, "o": {"allOf": [{"$ref": "#/$defs/Size"}]}},
        "$defs": {"Unit": {"enum": ["1", "2"]}, "Size": {"type": "integer"}},
    }
    offered = ({"type": "function", "function": {"name": "f", "parameters": parameters}},)
    text = "<function=f><parameter=u>1</parameter><parameter=o>2</parameter></function>"
    assert tool("qwen3_coder", text, ParserContext(offered)).calls == (("f", '{"u": "1", "o": 2}'),)


@settings(max_examples=200, deadline=None)
@given(
    schema=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["type", "properties", "parameters", "function", "anyOf", "$ref", "s"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_malformed_schemas_raise_no_exception(schema: object) -> None:
    offered = {"type": "function", "function": {"name": "f", "parameters": schema}}
    text = "<function=f><parameter=s>1</parameter></function>"
    ((name, arguments),) = tool("qwen3_coder", text, ParserContext((offered,))).calls
    assert (name, set(json.loads(arguments))) == ("f", {"s"})


THOUGHTS: list[tuple[str, str, str, str, str]] = [
    # parser, end of the prompt, reply, reasoning, content
    ("qwen3", "", "<think>\na\n</think>\n\nb", "a", "b"),
    ("qwen3", "", "<think>\n\n</think>\n\nb", "", "b"),
    ("qwen3", "", "b", "", "b"),
    ("qwen3", "", "b <think>a</think>", "", "b <think>a</think>"),
    ("qwen3", "", "<think>a</think>b<think>c", "a", "b<think>c"),
    ("qwen3", "", "<think>a\n\n", "a\n\n", ""),
    ("qwen3", "<think>\n", "a</think>b", "a", "b"),
    ("qwen3", "<think>\n", "a <", "a <", ""),
    ("qwen3", "<think>\n\n</think>\n\n", "b", "", "b"),
    ("deepseek_v31", "<｜Assistant｜></think>", "b", "", "b"),
    ("deepseek_v31", "<｜Assistant｜><think>", "a</think>b", "a", "b"),
    ("qwen3", "what is <think>?\nassistant\n", "b", "", "b"),
    ("deepseek_r1", "", "a</think>b", "a", "b"),
    ("deepseek_r1", "", "<think>\na</think>b", "a", "b"),
    ("deepseek_r1", "", "\n<think>a</think>\nb", "a", "b"),
    ("deepseek_r1", "", "a", "a", ""),
    ("deepseek_r1", "", "This\nThat</think>b\nc", "This\nThat", "b\nc"),
    ("deepseek_r1", "</think>\n\n", "b", "", "b"),
    ("base", "", "b <think>a</think>c<think>d", "ad", "b c"),
    ("glm45", "<|assistant|>", "\n<think>a</think>\nb", "a", "b"),
    ("glm45", "<|assistant|>\n<think></think>", "b", "", "b"),
    ("minimax_m2", "]~b]ai\n<think>\n", "a</think>b</think>c", "a", "bc"),
    ("kimi_k25", "<|im_middle|><think>", "a</think>b", "a", "b"),
    ("kimi_k25", "<|im_middle|><think></think>", "b", "", "b"),
    # A call within a thought that was not closed
    ("kimi_k25", "", "a<|tool_calls_section_begin|>x", "a", "<|tool_calls_section_begin|>x"),
    ("kimi_k25", "", "<think><|tool_calls_section_begin|>x", "", "<|tool_calls_section_begin|>x"),
    ("qwen3", "<think>", 'a\n\n<tool_call>\n{"name"', "a", '<tool_call>\n{"name"'),
    ("qwen3", "<think>", "a<tool_call>\n<function=f>", "a", "<tool_call>\n<function=f>"),
    ("qwen3", "<think>", "a<tool_call>{}</tool_call></think>b", "a", "<tool_call>{}</tool_call>b"),
    ("glm45", "<think>", "a<tool_call>f\n<arg_key>", "a", "<tool_call>f\n<arg_key>"),
    ("minimax_m2", "", "a<minimax:tool_call>\n<invoke", "a", "<minimax:tool_call>\n<invoke"),
    ("qwen3", "<think>", "Use <tool_call> for it</think>b", "Use <tool_call> for it", "b"),
    ("qwen3", "<think>", "a<tool_call>", "a<tool_call>", ""),
    # gpt-oss
    (
        "gpt_oss",
        "",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|constrain|> JSON "
        "<|message|>b<|return|>",
        "a",
        "b",
    ),
    ("gpt_oss", "", "<|channel|>analysis<|message|>a", "a", ""),
    ("gpt_oss", "", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|chan", "a", ""),
    ("gpt_oss", "", "plain", "", "plain"),
]


@pytest.mark.parametrize(("name", "end", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning_is_separate_from_the_answer(
    name: str, end: str, text: str, reasoning: str, content: str
) -> None:
    parts = found(read(SPECS[f"reasoning {name}"], [text], ParserContext(CONTEXT.tools, end)))
    assert (parts.reasoning, parts.content) == (reasoning, content)


def test_call_in_a_thought_stays_reasoning_without_tools() -> None:
    parts = found(read(SPECS["reasoning qwen3"], ["<think>a<tool_call>{"], ParserContext()))
    assert parts.reasoning == "a<tool_call>{"


def test_harmony_reasoning_and_calls_work_in_a_chain() -> None:
    text = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    )
    first = found(read(ParserSpec(f"{harmony.__name__}:HarmonyReasoning"), [text], CONTEXT))
    second = tool("gpt_oss", first.content)
    assert (first.reasoning, second.content, second.calls) == ("a", "b", (("f", "{}"),))


def test_think_markers_cut_anywhere_are_found() -> None:
    for at in range(1, len(thinking.OPEN)):
        text = "<think>a</think>b"
        parts = found(read(SPECS["reasoning qwen3"], [text[:at], text[at:]]))
        assert (parts.reasoning, parts.content) == ("a", "b")
