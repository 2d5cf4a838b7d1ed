"""`LLM.chat` on the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.engine import factory
from tokenspeed_core.errors import BadRequestError, ConfigError, EngineDeadError
from tokenspeed_core.text import TemplateError
from tokenspeed_core.worker.local import LocalRunner

GREEDY = SamplingParams(temperature=0, max_tokens=80)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=1024, max_num_seqs=4) as made:
        yield made


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chat_answers_a_conversation(llm: LLM) -> None:
    (output,) = llm.chat(ask("23 + 45 ="), GREEDY)
    assert output.outputs[0].text is not None
    assert output.outputs[0].text.endswith("23 + 45 = 68")
    assert output.outputs[0].finish_reason == "stop"
    assert output.prompt is not None
    assert "23 + 45" in output.prompt


def test_chat_takes_text(llm: LLM) -> None:
    (text,) = llm.chat("23 + 45 =", GREEDY, use_tqdm=False)
    assert text == llm.chat(ask("23 + 45 ="), GREEDY)[0]


def test_misspelt_message_key_is_refused(llm: LLM) -> None:
    with pytest.raises(BadRequestError, match=r"'contents' in messages\[0\].*content"):
        llm.chat([{"role": "user", "contents": "hi"}], GREEDY)


def test_repr_names_model_and_limits(llm: LLM) -> None:
    assert "demo" in repr(llm)
    assert "1024" in repr(llm)


def test_chat_answers_conversations_in_order(llm: LLM) -> None:
    outputs = llm.chat([ask("what is 12+30?"), ask("what is 50+11?")], GREEDY)
    assert [str(output.outputs[0].text).split("= ")[-1] for output in outputs] == ["42", "61"]


def test_tools_and_template_options_reach_the_prompt(llm: LLM) -> None:
    (output,) = llm.chat(
        ask("What is the weather in Paris?"), GREEDY, tools=[WEATHER], enable_thinking=False
    )
    assert "get_weather" in str(output.prompt)
    assert "<tool_call>" in str(output.outputs[0].text)


def test_unknown_template_option_is_refused(llm: LLM) -> None:
    with pytest.raises(TemplateError, match="thoughts"):
        llm.chat(ask("hi"), GREEDY, thoughts=True)


def test_settings_of_the_http_server_are_refused() -> None:
    with pytest.raises(ConfigError, match="port"):
        LLM(port=8001)


def test_chat_needs_a_template() -> None:
    with (
        LLM(skip_tokenizer_init=True, max_model_len=256, max_num_seqs=2) as bare,
        pytest.raises(BadRequestError, match="no chat template"),
    ):
        bare.chat(ask("hi"))


def test_failed_warmup_frees_the_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[LocalRunner] = []
    close = LocalRunner.close

    def note(runner: LocalRunner) -> None:
        closed.append(runner)
        close(runner)

    monkeypatch.setattr(LocalRunner, "close", note)
    monkeypatch.setattr(factory, "warm_up", lambda engine: False)
    with pytest.raises(EngineDeadError):
        LLM(max_model_len=256, max_num_seqs=2)
    (runner,) = closed
    assert runner._arena.numel() == 0
