"""The parsers that `auto` chooses, by excerpts of the chat templates that models are published with."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tokenspeed_server.reply_parsers import ModelTraits, find_parsers
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core.plugins.catalog import Catalog

HERMES = "For each function call, return JSON within <tool_call></tool_call> tags"
THINK = "{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}"
LLAMA = (
    "{{- '<|start_header_id|>' + message['role'] }}"
    '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name\'}}'
)
DEEPSEEK = (
    "{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'"
)


@pytest.mark.parametrize(
    ("template", "architecture", "reasoning", "tools"),
    [
        (HERMES, "Qwen2ForCausalLM", None, "qwen"),
        (HERMES + THINK, "Qwen3ForCausalLM", "qwen3", "qwen"),
        (
            "<tool_call>\n<function=example>\n<parameter=p>\n</function>\n</tool_call>" + THINK,
            "Qwen3NextForCausalLM",
            "qwen3",
            "qwen3_coder",
        ),
        (
            "[gMASK]<sop>"
            + THINK
            + "<tool_call>{name}<arg_key>{k}</arg_key><arg_value>{v}</tool_call>",
            "Glm4MoeForCausalLM",
            "glm45",
            "glm45",
        ),
        (
            "[gMASK]<sop>{{ '<think>' + reasoning_content + '</think>' }}"
            "{{- '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key><arg_value>",
            "Glm4MoeLiteForCausalLM",
            "glm45",
            "glm45",
        ),
        (
            "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}{{- ']~b]ai' ~ '<think>' }}"
            + THINK,
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            "minimax_m2",
        ),
        (
            "<|im_middle|><|tool_calls_section_begin|>{{id}}<|tool_call_argument_begin|>",
            "KimiK2ForCausalLM",
            None,
            "kimik2",
        ),
        (
            "<|im_middle|><think></think><|tool_calls_section_begin|><|tool_call_argument_begin|>",
            "KimiK25ForConditionalGeneration",
            "kimi_k25",
            "kimik2",
        ),
        (DEEPSEEK + " + '\n' + '```json'", "DeepseekV3ForCausalLM", None, "deepseek_v3"),
        (DEEPSEEK + "'```json'" + THINK, "DeepseekV3ForCausalLM", "deepseek_r1", "deepseek_v3"),
        (
            "{% set thinking = false %}" + DEEPSEEK + THINK,
            "DeepseekV3ForCausalLM",
            "deepseek_v31",
            "deepseek_v31",
        ),
        ("", "DeepseekV4ForCausalLM", "deepseek_v31", "deepseek_v4"),
        (LLAMA, "LlamaForCausalLM", None, "llama3_json"),
        ("{{- '<|python_start|>' }}", "Llama4ForConditionalGeneration", None, "pythonic"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' }}", "MistralForCausalLM", None, "mistral"),
        (
            "<|start|>assistant<|channel|>analysis<|message|> to=functions.",
            "GptOssForCausalLM",
            "gpt_oss",
            "gpt_oss",
        ),
        ("{{ message.content }}", "LlamaForCausalLM", None, None),
    ],
)
def test_auto_chooses_the_parsers_of_the_model(
    template: str, architecture: str, reasoning: str | None, tools: str | None
) -> None:
    found = find_parsers(ServerConfig(), Catalog.discover(), ModelTraits(template, architecture))
    assert [parser and parser.entry.name for parser in found] == [reasoning, tools]


def test_documentation_lists_every_parser() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parsers.md").read_text(encoding="utf-8")
    for kind in ("tool_parsers", "reasoning_parsers"):
        for entry in entry_points(group=f"tokenspeed.{kind}"):
            if entry.value.startswith("tokenspeed_parsers:"):
                assert f"`{entry.name}`" in page, entry.name
