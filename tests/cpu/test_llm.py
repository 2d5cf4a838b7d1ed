"""`LLM` with the demo model."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from plugin_files import write_plugin

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api.step import StepPlan
from tokenspeed_core.errors import BadRequestError, CapacityError, SelectionError, TokenSpeedError
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

FEW = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_total_tokens=512, max_model_len=256) as made:
        yield made


def test_llm_works_after_ctrl_c(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("12 + 34 =", FEW)[0].outputs[0].token_ids
    forward, num_steps = llm._engine.runner.forward, 0

    def interrupted(plan: StepPlan) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            signal.raise_signal(signal.SIGINT)
        forward(plan)

    with monkeypatch.context() as patched:
        patched.setattr(llm._engine.runner, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a b c"] * 3, SamplingParams(max_tokens=100, ignore_eos=True))
    assert num_steps == 3
    assert not llm._engine.has_work
    assert llm.generate("12 + 34 =", FEW)[0].outputs[0].token_ids == expected


def test_second_ctrl_c_shuts_the_llm_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(step_id: int) -> NoReturn:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second signal did not interrupt the step")

    with LLM(max_total_tokens=512, max_model_len=256) as llm:
        monkeypatch.setattr(llm._engine.runner, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a b c"] * 3, SamplingParams(max_tokens=100, ignore_eos=True))
        with pytest.raises(TokenSpeedError, match="shut down"):
            llm.generate("12 + 34 =", FEW)


def never(*words: object, **keywords: object) -> None:
    raise AssertionError(f"called: {words} {keywords}")


def test_generation_selects_and_imports_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("12 + 34 =", FEW)[0].outputs[0].token_ids
    plan = llm.kernel_plan
    with monkeypatch.context() as patched:
        for owner, name in (
            (Selector, "select"),
            (Selector, "select_attention"),
            (Catalog, "load"),
            (Catalog, "discover"),
            (importlib, "import_module"),
        ):
            patched.setattr(owner, name, never)
        assert llm.generate("12 + 34 =", FEW)[0].outputs[0].token_ids == expected
        assert (
            len(llm.generate(["a", "b " * 40], SamplingParams(max_tokens=4, ignore_eos=True))) == 2
        )
    assert llm.kernel_plan == plan


def test_missing_kernel_fails_before_weights_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tokenspeed_models.loading.safetensors.read_safetensors", never)
    with pytest.raises(AssertionError, match=r"called: .*demo"):
        LLM(device="cpu")
    with pytest.raises(SelectionError, match="--attention-backend"):
        LLM(device="cpu", attention_backend="triton")


@pytest.mark.parametrize(
    "ids",
    [
        [5, 6, 7],
        (5, 6, 7),
        range(5, 8),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], np.uint8),
        [np.int32(5), 6, 7],
        [0, 1, 5],
    ],
)
def test_token_ids_may_be_any_sequence(llm: LLM, ids: Any) -> None:
    assert llm.generate({"prompt_token_ids": ids}, FEW)[0].prompt_token_ids == list(ids)


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_token_ids": [True]},
        {"prompt_token_ids": 7},
        {"prompt_token_ids": "567"},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [1.0]},
        {"prompt_token_ids": [10**6]},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [2**70]},
        {"prompt_token_ids": np.array([2**32 + 5])},
        {"prompt_token_ids": np.array([[5]])},
        {"prompt_token_ids": np.array([5.0])},
        {"prompt_token_ids": [5, True]},
        {"prompt_token_ids": np.array([True])},
        {"prompt_token_ids": [5, np.True_]},
        {"prompt_token_ids": {5, 6}},
        {"prompt_token_ids": [[5]]},
        {"prompt_token_ids": [5, None]},
        {"prompt_token_ids": np.array(5)},
        {"prompt": "a", "images": []},
        {},
        {"prompt": 5},
        "",
    ],
)
def test_invalid_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(BadRequestError):
        llm.generate([prompt], FEW)


def test_finished_text_is_decoded_during_later_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, runner = llm.tokenizer, llm._engine.runner
    assert tokenizer is not None
    calls: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*words: Any, **keywords: Any) -> Any:
            calls.append(name)
            return call(*words, **keywords)

        return note

    with monkeypatch.context() as patched:
        patched.setattr(runner, "collect", noted("collect", runner.collect))
        patched.setattr(tokenizer, "detokenizer", noted("text", tokenizer.detokenizer))
        params = [
            SamplingParams(temperature=0, max_tokens=num, ignore_eos=True) for num in (8, 2, 4)
        ]
        outputs = llm.generate(["a", "b c", "12 + 34 ="], params)
    assert calls.count("text") == 3
    assert calls[-2:] == ["collect", "text"]
    for output in outputs:
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)


@pytest.mark.parametrize("params", [{"max_tokens": 4}, [{"max_tokens": 4}], [FEW, FEW]])
def test_invalid_sampling_params_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(BadRequestError, match="sampling_params"):
        llm.generate(["a"], params)


def test_generate_after_shutdown_raises() -> None:
    llm = LLM(max_total_tokens=64, max_model_len=64)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(TokenSpeedError, match="shut down"):
        llm.generate("a", FEW)


def test_max_model_len_beyond_the_cache_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"--max-model-len 100 .*64 .*--max-total-tokens"):
        LLM(max_total_tokens=64, max_model_len=100)


def test_start_logs_the_capacity_of_shared_groups(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen2ForCausalLM"],
                "vocab_size": 64,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 128,
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
            }
        )
    )
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "block_size": 16,
    }
    with (
        caplog.at_level("INFO", "tokenspeed.engine"),
        LLM(str(tmp_path), max_total_tokens=512, **settings) as llm,
    ):
        kv = llm._engine.scheduler.kv
        assert (len(kv.groups), kv.pool.num_pages) == (2, 2 * 512 // 16)
    assert "holds 16 tokens of group full or 16 tokens of group window" in caplog.text
    assert all(part in caplog.text for part in ("512 tokens", "blocks of 16", "128 tokens"))
    assert "has no effect" not in caplog.text


def test_settings_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(
        device="cpu",
        enforce_eager=True,
        max_prefill_tokens=100,
        max_total_tokens=512,
        max_model_len=64,
    ):
        pass
    messages = [
        record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()
    ]
    assert [message.split()[0] for message in messages] == [
        "--enforce-eager",
        "--max-prefill-tokens",
    ]


def test_failed_config_hooks_are_not_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modules = {
        f"observer_{name}": (
            "from tokenspeed_core.api import hookimpl\n"
            "steps = []\n"
            f"@hookimpl\ndef adjust_config(config):\n    {body}\n"
            "@hookimpl\ndef observe_step(record):\n    steps.append(record)\n"
        )
        for name, body in (("sound", "return {}"), ("broken", "raise RuntimeError('broken')"))
    }
    entries = {"sound": "observer_sound [api1]", "broken": "observer_broken [api1]"}
    write_plugin(tmp_path, "observer", "hooks", entries, modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    with LLM(max_total_tokens=64, max_model_len=64) as llm:
        llm.generate("a", FEW)
    observed = {name: sys.modules.pop(f"observer_{name}").steps for name in ("sound", "broken")}
    assert observed["sound"]
    assert not observed["broken"]
    assert "adjust_config of observer:broken failed" in caplog.text
