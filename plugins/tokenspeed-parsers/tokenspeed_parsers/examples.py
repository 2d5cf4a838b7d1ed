"""Replies in each format, as the models' chat templates write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenspeed_core.api import ParserExample

Call = tuple[str, Mapping[str, Any]]
_PARIS: Call = ("get_weather", {"city": "Paris"})
_TOKYO: Call = ("get_weather", {"city": '東京 🌧 "x"\nC:\\', "days": 3, "tags": ["a", "b"]})
_AREA: Call = ("get_weather", {"city": "Oslo", "area": {"box": [1.5, {"n": None}], "exact": True}})
_TIME: Call = ("get_time", {})


def tool_examples(
    write: Callable[[Sequence[Call]], str],
    *,
    call_ids: Callable[[Sequence[Call]], Sequence[str]] = lambda calls: (),
) -> tuple[ParserExample, ...]:
    """Return replies with calls, which `write` puts into the format."""

    def example(calls: Sequence[Call], before: str = "", after: str = "") -> ParserExample:
        return ParserExample(
            before + write(calls) + after,
            content=before.rstrip("\n") + after.lstrip(),
            calls=tuple(calls),
            call_ids=tuple(call_ids(calls)),
        )

    return (
        example([_PARIS], before="Let me look.\n"),
        example([_PARIS, _TOKYO, _TIME]),
        example([_AREA, _AREA], before="é: ", after="\nDone."),
        example([_TIME]),
    )


def tagged(calls: Sequence[Call]) -> str:
    """Write calls for `hermes` and `qwen`."""
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def bare_json(calls: Sequence[Call]) -> str:
    """Write calls for `json` and `llama3_json`."""
    return "; ".join(_object(call, "parameters") for call in calls)


def mistral(calls: Sequence[Call]) -> str:
    """Write calls for `mistral`."""
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]{call_id}[ARGS]{_json(arguments)}"
        for (name, arguments), call_id in zip(calls, mistral_ids(calls), strict=True)
    )


def mistral_ids(calls: Sequence[Call]) -> Sequence[str]:
    """Return the call ids that `mistral` writes."""
    return [f"Ab3dE6gH{number}" for number in range(len(calls))]


def mistral_list(calls: Sequence[Call]) -> str:
    """Write calls for `mistral` as the tokenizers of version 3 do."""
    return f"[TOOL_CALLS] [{', '.join(map(_object, calls))}]"


def kimik2(calls: Sequence[Call]) -> str:
    """Write calls for `kimik2`."""
    written = "".join(
        f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{_json(arguments)}"
        "<|tool_call_end|>"
        for (_, arguments), call_id in zip(calls, kimi_ids(calls), strict=True)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def kimi_ids(calls: Sequence[Call]) -> Sequence[str]:
    """Return the call ids that `kimik2` writes."""
    return [f"functions.{name}:{number}" for number, (name, _) in enumerate(calls)]


def deepseek_v3(calls: Sequence[Call]) -> str:
    """Write calls for `deepseek_v3`."""
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    """Write calls for `deepseek_v31`."""
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v4(calls: Sequence[Call]) -> str:
    """Write calls for `deepseek_v4`."""
    lines = ["<｜DSML｜tool_calls>"]
    for name, arguments in calls:
        lines.append(f'<｜DSML｜invoke name="{name}">')
        for key, value in arguments.items():
            is_string = json.dumps(isinstance(value, str))
            lines.append(
                f'<｜DSML｜parameter name="{key}" string="{is_string}">{_text(value)}'
                "</｜DSML｜parameter>"
            )
        lines.append("</｜DSML｜invoke>")
    return "\n".join([*lines, "</｜DSML｜tool_calls>"])


def qwen3_coder(calls: Sequence[Call]) -> str:
    """Write calls for `qwen3_coder`."""
    written = []
    for name, arguments in calls:
        lines = ["<tool_call>", f"<function={name}>"]
        for key, value in arguments.items():
            lines += [f"<parameter={key}>", _text(value), "</parameter>"]
        written.append("\n".join([*lines, "</function>", "</tool_call>"]))
    return "\n".join(written)


def minimax_m2(calls: Sequence[Call]) -> str:
    """Write calls for `minimax_m2`."""
    lines = ["<minimax:tool_call>"]
    for name, arguments in calls:
        lines.append(f'<invoke name="{name}">')
        for key, value in arguments.items():
            lines.append(f'<parameter name="{key}">{_text(value)}</parameter>')
        lines.append("</invoke>")
    return "\n".join([*lines, "</minimax:tool_call>"])


def glm45(calls: Sequence[Call]) -> str:
    """Write calls for `glm45`."""
    written = []
    for name, arguments in calls:
        lines = [f"<tool_call>{name}"]
        for key, value in arguments.items():
            lines += [f"<arg_key>{key}</arg_key>", f"<arg_value>{_text(value)}</arg_value>"]
        written.append("\n".join([*lines, "</tool_call>"]))
    return "\n".join(written)


def pythonic(calls: Sequence[Call]) -> str:
    """Write calls for `pythonic`."""
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"[{', '.join(written)}]"


def gpt_oss(calls: Sequence[Call]) -> str:
    """Write calls for `gpt_oss`."""
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"
        "<|call|>"
        for name, arguments in calls
    )


def thinking_examples(prompt_end: str = "", opening: str = "<think>") -> tuple[ParserExample, ...]:
    """Return replies with a thought between tags. `prompt_end` switches thinking on."""
    thought = f"{opening}\nIt rains in 東京.\n\nSo 2 < 3 🌧\n</think>\n\nTake a coat.\n  Or two."
    return (
        ParserExample(
            thought,
            reasoning="It rains in 東京.\n\nSo 2 < 3 🌧",
            content="Take a coat.\n  Or two.",
            prompt_end=prompt_end,
        ),
        ParserExample("Take a coat.", content="Take a coat.", prompt_end="<think>\n\n</think>\n\n"),
        ParserExample(
            f"{opening}\n\n</think>\n\nTake a coat.", content="Take a coat.", prompt_end=prompt_end
        ),
    )


def gpt_oss_reasoning() -> tuple[ParserExample, ...]:
    """Return replies in the harmony format."""
    thought = "<|channel|>analysis<|message|>It rains in 東京.\n\nSo 2 < 3 🌧<|end|>"
    start = "<|start|>assistant"
    return (
        ParserExample(
            f"{thought}{start}<|channel|>final<|message|>Take a coat.\n  Or two.",
            reasoning="It rains in 東京.\n\nSo 2 < 3 🌧",
            content="Take a coat.\n  Or two.",
        ),
        ParserExample("<|channel|>final<|message|>Take a coat.", content="Take a coat."),
        ParserExample(
            f"{thought}{start}<|channel|>commentary<|message|>I look.<|end|>{start}"
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
            reasoning="It rains in 東京.\n\nSo 2 < 3 🌧",
            content=f"I look.{start}<|channel|>commentary to=functions.f <|constrain|>json"
            "<|message|>{}<|call|>",
        ),
    )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _object(call: Call, key: str = "arguments") -> str:
    return f'{{"name": {_json(call[0])}, "{key}": {_json(call[1])}}}'
