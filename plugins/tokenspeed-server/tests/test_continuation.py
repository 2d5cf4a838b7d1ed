"""Answers that continue the last message have the prompts of transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_support import make_tokenizer
from tokenspeed_server.api_body import parse_body
from tokenspeed_server.prompts import chat_ids
from tokenspeed_server.protocol import ChatRequest
from transformers.utils.chat_template_utils import render_jinja_template

from tokenspeed_core.commands.serving import BadRequestError, InputProcessor, ModelText, Ready
from tokenspeed_core.text import ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} </s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOKENIZER = make_tokenizer()
LIMITS = Ready(4096, 4096, 400, "")


def prompt(template: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    body = parse_body(json.dumps({"messages": messages, **fields}).encode(), ChatRequest).body
    text = ModelText(TOKENIZER, ChatTemplate(template, {}))
    ids = chat_ids(InputProcessor(text, LIMITS), body, None)
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def chat(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}]


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
@settings(max_examples=60, deadline=None)
@given(text=st.text(" ab\n.é", min_size=1, max_size=12).filter(str.strip))
def test_continued_prompt_equals_transformers(template: str, text: str) -> None:
    (expected,), _ = render_jinja_template(
        [chat(text)],
        chat_template=template,
        continue_final_message=True,
        add_generation_prompt=False,
    )
    ours = prompt(template, chat(text), continue_final_message=True, add_generation_prompt=False)
    assert ours == expected


def test_continued_prompt_ends_with_the_last_text() -> None:
    messages = chat([{"type": "text", "text": "one"}, {"type": "text", "text": "two "}])
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt(CHATML, messages, **fields).endswith("assistant\none\ntwo ")


def test_prompt_without_generation_prompt_ends_with_the_messages() -> None:
    assert prompt(CHATML, chat("x"), add_generation_prompt=False).endswith("x<|im_end|>\n")


@pytest.mark.parametrize(
    ("template", "messages", "adds_prompt"),
    [
        (CHATML, chat("x"), True),
        (CHATML, chat(""), False),
        ("{{ messages[0].content }}", chat("x"), False),
    ],
)
def test_impossible_continuation_is_refused(
    template: str, messages: list[dict[str, Any]], adds_prompt: bool
) -> None:
    with pytest.raises(BadRequestError) as caught:
        prompt(template, messages, continue_final_message=True, add_generation_prompt=adds_prompt)
    assert caught.value.param == "continue_final_message"
