"""Prompts equal those of transformers: the text of templates, and the ids of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from tokenspeed_core.text.template import load_chat_template
from tokenspeed_core.text.tokenizer import load_tokenizer

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' + call.function.name + (call.function.arguments | tojson(indent=2)) }}
        {%- endfor %}
    {%- else %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') | trim }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- endif %}"""
INST = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}{% continue %}{% endif %}
    {% if (message['role'] == 'user') %}
[INST] {{ message['content'] | trim }} [/INST]{% else %}
 {% generation %}{{ message['content'] }}{% endgeneration %}{{ eos_token }}
{% endif %}{% endfor %}"""
ROLES = (
    "{% for m in messages -%}\n  {%- if loop.first %}{{ bos_token }}{% endif -%}\n"
    "  <{{ m.role | upper }}>{{ m.content }}\n{% endfor %}{{ messages | length }}{{ tools | length if tools }}"
    "{{ messages | map(attribute='role') | join(',') }}{{ '%05.1f' | format(2.345) }}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "héllo <b> & 'quotes' \"x\" 🙂"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": " two  spaces "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "user", "content": "more\n\n"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {
                        "name": "weather",
                        "arguments": {"city": "Zürich", "days": [1, 2.5, None, True]},
                    },
                }
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "z": 1, "a": "é"}},
    }
]


def checkpoint(folder: Path, template: str, config: dict[str, Any], processor: Any = None) -> Path:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
    )
    backend.train_from_iterator([template], trainer)
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    if processor is not None:
        backend.post_processor = processor
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", [CHATML, INST, ROLES])
def test_chat_prompts_equal_transformers(
    tmp_path: Path, template: str, chat: list[dict[str, Any]], tools: Any
) -> None:
    folder = checkpoint(tmp_path, template, {})
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    ours = load_chat_template(folder, tokenizer.special_tokens)
    assert ours is not None
    for options in ({}, {"enable_thinking": False}):
        known = {name: value for name, value in options.items() if name in ours.options}
        expected = reference.apply_chat_template(
            chat, tools=tools, tokenize=False, add_generation_prompt=True, **known
        )
        text = ours.render(chat, tools, known)
        assert text == expected
        ids = reference.apply_chat_template(
            chat, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False, **known
        )
        assert tokenizer.encode(text, add_special_tokens=False).tolist() == ids


BOS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])


@pytest.mark.parametrize("processor", [None, BOS, processors.ByteLevel(trim_offsets=False)])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)
def test_plain_prompts_equal_transformers(
    tmp_path: Path, config: dict[str, Any], processor: Any
) -> None:
    folder = checkpoint(tmp_path, CHATML, config, processor)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    for text in ("hello  world", "<|im_start|>user\nhé 🙂<tool_call>", "", " x\n\n"):
        ids = reference(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=True).tolist() == ids
        for skip in (True, False):
            expected = reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip_special_tokens=skip) == expected
