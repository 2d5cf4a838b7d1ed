"""Logits processors of plugins: requests name them, and only their rows change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plugin_files import write_plugin
from tokenspeed_testing.logits_processor import LogitsProcessorConformance

from tokenspeed_core import LLM, BadRequestError, SamplingParams, TokenSpeedError

ENTRIES = {
    "no-repeat": "acme_logits:NO_REPEAT [api1]",
    "broken": "acme_logits:BROKEN [api1]",
}
PROMPT = {"prompt_token_ids": [5, 6, 7, 8] * 4}
PLAIN = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def using(**processors: Any) -> SamplingParams:
    names = {name.replace("_", "-"): params for name, params in processors.items()}
    return PLAIN.model_copy(update={"logits_processors": names})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the example plugin."""
    site = tmp_path_factory.mktemp("site")
    write_plugin(site, "acme-logits", "logits_processors", ENTRIES, {})
    shutil.copy(Path(__file__).parent / "acme_logits.py", site)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(site))
        yield site


@pytest.fixture(scope="module")
def llm(site: Path) -> Iterator[LLM]:
    with LLM(
        enable_custom_logit_processor=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=3,
        max_total_tokens=160,
        chunked_prefill_size=16,
    ) as made:
        yield made


def tokens(llm: LLM, *params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate([PROMPT] * len(params), list(params))
    return [output.outputs[0].token_ids for output in outputs]


def test_example_conforms(site: Path) -> None:
    import acme_logits

    suite = type("Suite", (LogitsProcessorConformance,), {"spec": acme_logits.NO_REPEAT})()
    for name in vars(LogitsProcessorConformance):
        if name.startswith("test_") and "imports" not in name:
            getattr(suite, name)()


def test_only_named_rows_change(llm: LLM) -> None:
    (plain,) = tokens(llm, PLAIN)
    changed, unchanged = tokens(llm, using(no_repeat={}), PLAIN)
    assert unchanged == plain
    assert len(set(plain)) < len(plain)
    assert len(set(changed)) == len(changed)


def test_parameters_reach_the_processor(llm: LLM) -> None:
    repeats, from_prompt, nothing = tokens(
        llm,
        using(no_repeat={"penalty": -1000}),
        using(no_repeat={"penalty": -1000, "prompt": True}),
        using(no_repeat={"penalty": 0}),
    )
    (plain,) = tokens(llm, PLAIN)
    assert set(repeats) == {plain[0]}
    assert set(from_prompt) <= {5, 6, 7, 8}
    assert nothing == plain


def test_preemption_keeps_the_history(llm: LLM) -> None:
    (expected,) = tokens(llm, using(no_repeat={}))
    num_before = llm._engine.scheduler.num_preemptions
    longer = PLAIN.model_copy(update={"max_tokens": 48, "logits_processors": {"no-repeat": {}}})
    several = tokens(llm, longer, longer, longer, longer)
    assert llm._engine.scheduler.num_preemptions > num_before
    assert all(each[: len(expected)] == expected for each in several)
    assert all(len(set(each)) == len(each) == 48 for each in several)


@pytest.mark.parametrize("at", ["begin", "apply"])
def test_broken_processor_ends_only_its_sequences(llm: LLM, at: str) -> None:
    (plain,) = tokens(llm, PLAIN)
    with pytest.raises(TokenSpeedError, match="finite logits"):
        tokens(llm, PLAIN, using(broken={"at": at}))
    assert tokens(llm, PLAIN) == [plain]


@pytest.mark.parametrize(
    ("processors", "shown"),
    [
        ({"no-repet": {}}, "no-repeat"),
        ({"os:system": {}}, "available: broken, no-repeat"),
        ({"no-repeat": {"penalti": 1}}, "penalti"),
        ({"no-repeat": {"penalty": "x"}}, "must be a number"),
        ({"broken": {"x": "y" * 20_000}}, "16384"),
        ({"broken": {"x": object()}}, "JSON"),
    ],
)
def test_wrong_processor_or_parameter_is_named(
    llm: LLM, processors: dict[str, Any], shown: str
) -> None:
    params = PLAIN.model_copy(update={"logits_processors": processors})
    with pytest.raises(BadRequestError, match=shown) as caught:
        tokens(llm, params)
    assert caught.value.param == "logits_processors"


def test_processors_are_off_without_the_flag(site: Path) -> None:
    with LLM(max_model_len=64, max_total_tokens=64) as plain:
        with pytest.raises(BadRequestError, match="--enable-custom-logit-processor"):
            tokens(plain, using(no_repeat={}))
        assert plain._engine.runner._assembly.processors == {}  # type: ignore[attr-defined]
