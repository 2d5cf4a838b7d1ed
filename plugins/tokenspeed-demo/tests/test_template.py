"""The chat template, rendered by jinja alone and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenspeed_demo import CHECKPOINT
from tokenspeed_demo.items import REQUIRED, Item, held_out_set
from tokenspeed_demo.render import Renderer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def prompt(
    *messages: dict[str, Any], tools: tuple[dict[str, Any], ...] = (), enable_thinking: bool = True
) -> str:
    item = Item("test", messages, "", frozenset(), tools, enable_thinking)
    return Renderer(Path(CHECKPOINT.path) / "chat_template.jinja").prompt(item)


def test_question_opens_the_assistants_turn() -> None:
    assert (
        prompt({"role": "user", "content": "hi"})
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_system_prompt_comes_first() -> None:
    text = prompt({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})
    assert text.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )


def test_tools_are_json_in_the_system_turn() -> None:
    text = prompt({"role": "system", "content": "Be brief."}, QUESTION, tools=(WEATHER,))
    assert text.startswith(
        '<|im_start|>system\nBe brief.\n\nTools:\n{"type": "function", "function": {"name": "get_w'
    )
    assert "<tool_call>" in text.partition("<|im_end|>")[0]
    assert prompt(QUESTION, tools=(WEATHER,)).startswith("<|im_start|>system\nTools:\n")


def test_disabled_thinking_adds_an_empty_thought() -> None:
    assert prompt(QUESTION, enable_thinking=False).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize(
    "arguments", ['{"city": "Paris"}', {"city": "Paris"}], ids=["as text", "as an object"]
)
@pytest.mark.parametrize("content", ["", None])
def test_calls_and_results_are_rendered_as_in_training(
    arguments: object, content: str | None
) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    text = prompt(
        QUESTION,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "21 degrees"},
        tools=(WEATHER,),
    )
    assert text.endswith(
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n21 degrees<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thoughts_of_earlier_turns_are_removed() -> None:
    answer = {"role": "assistant", "content": "<think>\n2+2+0=4 carry 0\n</think>\n\n2 + 2 = 4"}
    text = prompt({"role": "user", "content": "2+2"}, answer, {"role": "user", "content": "thanks"})
    assert "<|im_start|>assistant\n2 + 2 = 4<|im_end|>" in text


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "2 +"}, {"type": "text", "text": " 2"}]
    assert "user\n2 + 2<|im_end|>" in prompt({"role": "user", "content": parts})


def test_prompts_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip(
        "transformers", reason="the reference rendering is transformers'"
    )
    tokenizers = pytest.importorskip("tokenizers")
    theirs = transformers.AutoTokenizer.from_pretrained(CHECKPOINT.path)
    ours = tokenizers.Tokenizer.from_file(str(Path(CHECKPOINT.path) / "tokenizer.json"))
    renderer = Renderer()
    for item in [item for task in REQUIRED for item in held_out_set(task, 10)]:
        rendered = theirs.apply_chat_template(
            list(item.messages),
            tools=list(item.tools) or None,
            add_generation_prompt=True,
            enable_thinking=item.enable_thinking,
            tokenize=False,
        )
        assert rendered == renderer.prompt(item)
        assert theirs(rendered)["input_ids"] == ours.encode(rendered).ids
        assert ours.decode(ours.encode(rendered).ids, skip_special_tokens=False) == rendered
