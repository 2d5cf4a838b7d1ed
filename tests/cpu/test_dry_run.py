"""Before anything is loaded: what a dry run settles, and what is refused there as at a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenspeed_core.config import Config
from tokenspeed_core.engine import llm
from tokenspeed_core.engine.launch import dry_run
from tokenspeed_core.errors import CheckpointError, PluginError


def test_a_dry_run_says_which_tokenizer_and_template_are_meant_and_only_what_applies(tmp_path: Path) -> None:
    report = dry_run(Config(device="cpu"))
    assert "chat template: the model's own" in report
    assert "left_bytes" not in report
    assert "known after start" not in report
    mine = tmp_path / "mine.jinja"
    mine.write_text("{{ messages }}")
    assert f"chat template: {mine}" in dry_run(Config(device="cpu", chat_template=str(mine)))
    assert "tokenizer none" in dry_run(Config(device="cpu", skip_tokenizer_init=True))


@pytest.mark.parametrize(
    ("setting", "value", "error", "said"),
    [
        ("tokenizer", "/nope", CheckpointError, "--tokenizer /nope: no such directory"),
        ("chat_template", "/nope.jinja", CheckpointError, "/nope.jinja"),
        ("load_format", "nonsense", PluginError, "no load_formats named 'nonsense'"),
        ("schedule_policy", "prioritty", PluginError, "did you mean priority"),
    ],
)
def test_a_dry_run_refuses_what_a_start_would(setting: str, value: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        dry_run(Config(device="cpu", **{setting: value}))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_is_not_there_is_refused_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "start", lambda *arguments, **keywords: pytest.fail("the engine was started"))
    with pytest.raises(CheckpointError, match="--tokenizer /nope: no such directory"):
        llm.LLM(device="cpu", tokenizer="/nope")
