"""Descriptors of the reply parsers for `--tool-call-parser` and `--reasoning-parser`."""

from __future__ import annotations

from dataclasses import replace

from tokenspeed_core.api import CallTemplate, ParserSpec, ReasoningMarks
from tokenspeed_parsers import examples as given

__all__ = [
    "BASE",
    "DEEPSEEK_R1",
    "DEEPSEEK_V3",
    "DEEPSEEK_V31",
    "DEEPSEEK_V31_REASONING",
    "DEEPSEEK_V4",
    "GLM45",
    "GLM45_REASONING",
    "GPT_OSS",
    "GPT_OSS_REASONING",
    "HERMES",
    "JSON",
    "KIMIK2",
    "KIMI_K25",
    "LLAMA3_JSON",
    "MINIMAX_M2",
    "MINIMAX_M2_REASONING",
    "MISTRAL",
    "PASSTHROUGH",
    "PYTHONIC",
    "QWEN",
    "QWEN3",
    "QWEN3_CODER",
]

_PACKAGE = "tokenspeed_parsers"

QWEN = ParserSpec(
    f"{_PACKAGE}.tagged:TaggedCalls",
    given.tool_examples(given.tagged),
    template_marks=("<tool_call>", "</tool_call>"),
    calls=CallTemplate(
        '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"
    ),
)
HERMES = replace(QWEN, template_marks=())
QWEN3_CODER = ParserSpec(
    f"{_PACKAGE}.qwen3_coder:calls",
    given.tool_examples(given.qwen3_coder),
    template_marks=("<tool_call>", "</tool_call>", "<function=", "<parameter="),
)
KIMIK2 = ParserSpec(
    f"{_PACKAGE}.kimik2:KimiCalls",
    given.tool_examples(given.kimik2, call_ids=given.kimi_ids),
    reads_special_tokens=True,
    template_marks=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    calls=CallTemplate(
        "<|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
)
DEEPSEEK_V3 = ParserSpec(
    f"{_PACKAGE}.deepseek_v3:DeepseekV3Calls",
    given.tool_examples(given.deepseek_v3),
    reads_special_tokens=True,
    template_marks=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),
    calls=CallTemplate(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        separator="\n",
        end="<｜tool▁calls▁end｜>",
    ),
)
DEEPSEEK_V31 = ParserSpec(
    f"{_PACKAGE}.deepseek_v31:DeepseekV31Calls",
    given.tool_examples(given.deepseek_v31),
    reads_special_tokens=True,
    template_marks=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    calls=CallTemplate(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
)
DEEPSEEK_V4 = ParserSpec(
    f"{_PACKAGE}.deepseek_v4:calls",
    given.tool_examples(given.deepseek_v4),
    reads_special_tokens=True,
    template_marks=("｜DSML｜", "tool_calls"),
    architectures=("DeepseekV4ForCausalLM",),
)
LLAMA3_JSON = ParserSpec(
    f"{_PACKAGE}.bare_json:BareJson",
    given.tool_examples(given.bare_json),
    reads_special_tokens=True,
    template_marks=("<|start_header_id|>", '"name": function name', '"parameters"'),
    calls=CallTemplate('{"name": "', '", "parameters": ', "}", begin="[", separator=", ", end="]"),
)
JSON = replace(LLAMA3_JSON, reads_special_tokens=False, template_marks=())
PYTHONIC = ParserSpec(
    f"{_PACKAGE}.pythonic:PythonCalls",
    given.tool_examples(given.pythonic),
    reads_special_tokens=True,
    template_marks=("<|python_start|>",),
)
MISTRAL = ParserSpec(
    f"{_PACKAGE}.mistral:MistralCalls",
    (
        *given.tool_examples(given.mistral, call_ids=given.mistral_ids),
        *given.tool_examples(given.mistral_list),
    ),
    reads_special_tokens=True,
    template_marks=("[TOOL_CALLS]",),
    calls=CallTemplate("[TOOL_CALLS]", "[ARGS]", ""),
)
GLM45 = ParserSpec(
    f"{_PACKAGE}.glm45:GlmCalls",
    given.tool_examples(given.glm45),
    reads_special_tokens=True,
    template_marks=("<tool_call>", "<arg_key>", "<arg_value>"),
)
MINIMAX_M2 = ParserSpec(
    f"{_PACKAGE}.minimax_m2:calls",
    given.tool_examples(given.minimax_m2),
    reads_special_tokens=True,
    template_marks=("<minimax:tool_call>",),
)
GPT_OSS = ParserSpec(
    f"{_PACKAGE}.harmony:HarmonyCalls",
    given.tool_examples(given.gpt_oss),
    reads_special_tokens=True,
    template_marks=("<|channel|>", "<|message|>", "functions."),
    architectures=("GptOssForCausalLM",),
    calls=CallTemplate(
        "<|channel|>commentary to=functions.",
        " <|constrain|>json<|message|>",
        "<|call|>",
        separator="<|start|>assistant",
    ),
)
PASSTHROUGH = ParserSpec(f"{_PACKAGE}.passthrough:Passthrough")

_THINK = ReasoningMarks("<think>", "</think>")
_OPEN_THINK = ReasoningMarks("<think>", "</think>", is_open=True)
QWEN3 = ParserSpec(
    f"{_PACKAGE}.thinking:qwen3",
    given.thinking_examples(),
    template_marks=("</think>",),
    reasoning=_THINK,
)
BASE = ParserSpec(f"{_PACKAGE}.thinking:base", given.thinking_examples(), reasoning=_THINK)
DEEPSEEK_R1 = ParserSpec(
    f"{_PACKAGE}.thinking:deepseek_r1",
    given.thinking_examples(opening=""),
    template_marks=("<｜Assistant｜>", "</think>"),
    reasoning=_OPEN_THINK,
)
DEEPSEEK_V31_REASONING = replace(
    QWEN3,
    reads_special_tokens=True,
    template_marks=("<｜Assistant｜>", "</think>", "thinking"),
    architectures=("DeepseekV4ForCausalLM",),
)
KIMI_K25 = replace(
    DEEPSEEK_R1,
    reads_special_tokens=True,
    template_marks=("<|im_middle|>", "</think>"),
)
GLM45_REASONING = replace(
    QWEN3, reads_special_tokens=True, template_marks=("[gMASK]<sop>", "</think>")
)
MINIMAX_M2_REASONING = ParserSpec(
    f"{_PACKAGE}.thinking:minimax_m2",
    given.thinking_examples("]~b]ai\n<think>\n", opening=""),
    reads_special_tokens=True,
    template_marks=("]~b]ai", "</think>"),
    reasoning=_OPEN_THINK,
)
GPT_OSS_REASONING = ParserSpec(
    f"{_PACKAGE}.harmony:HarmonyReasoning",
    given.gpt_oss_reasoning(),
    reads_special_tokens=True,
    template_marks=("<|channel|>", "<|message|>"),
    architectures=("GptOssForCausalLM",),
    reasoning=ReasoningMarks("", "<|channel|>final<|message|>", is_open=True),
)
