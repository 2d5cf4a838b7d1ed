"""The comparison of families with transformers passes correct families and catches planted faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenspeed_models_gemma
from tokenspeed_models_gemma import GEMMA3, GEMMA3_MULTIMODAL
from tokenspeed_models_gemma import describe as gemma_describe
from tokenspeed_models_gemma import model as gemma_model
from tokenspeed_models_gemma.describe import GemmaConfig, read_gemma3
from tokenspeed_models_olmo import OLMO3
from tokenspeed_testing.against_transformers import TransformersConformance
from tokenspeed_testing.cases import NotRun

EXAMPLE = Path(str(tokenspeed_models_gemma.__file__)).parent / "example" / "gemma3" / "config.json"


def suite(**attributes: Any) -> TransformersConformance:
    made: TransformersConformance = type("Suite", (TransformersConformance,), attributes)()
    return made


def gemma(**changes: Any) -> TransformersConformance:
    return suite(spec=GEMMA3, config={**json.loads(EXAMPLE.read_text()), **changes})


def test_correct_family_passes() -> None:
    gemma().test_number_of_parameters_equals_transformers()
    gemma().test_logits_equal_transformers()
    gemma().test_greedy_tokens_equal_transformers()


def test_bidirectional_family_passes() -> None:
    made = gemma(use_bidirectional_attention=True)
    made.test_logits_equal_transformers()
    made.test_greedy_tokens_equal_transformers()


def test_family_without_an_example_gets_a_shrunk_default() -> None:
    made = suite(spec=OLMO3)
    made.test_number_of_parameters_equals_transformers()
    made.test_logits_equal_transformers()
    _, config = made._model
    assert set(config["layer_types"]) == {"full_attention", "sliding_attention"}


def wrong_window(c: GemmaConfig) -> GemmaConfig:
    windows = tuple(None if window is None else window + 1 for window in c.decoder.windows)
    return replace(c, decoder=replace(c.decoder, windows=windows))


def wrong_layers_with_windows(c: GemmaConfig) -> GemmaConfig:
    return replace(c, decoder=replace(c.decoder, windows=c.decoder.windows[1:] + (9,)))


def one_rotation_for_all_layers(c: GemmaConfig) -> GemmaConfig:
    return replace(c, local_rope=c.decoder.rope)


def causal(c: GemmaConfig) -> GemmaConfig:
    return replace(c, is_bidirectional=False)


def test_causal_mask_of_a_bidirectional_family_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gemma_describe, gemma_model):
        monkeypatch.setattr(module, "read_gemma3", lambda config: causal(read_gemma3(config)))
    with pytest.raises(AssertionError, match="in transformers"):
        gemma(use_bidirectional_attention=True).test_logits_equal_transformers()


def wrong_scale(c: GemmaConfig) -> GemmaConfig:
    return replace(c, attention_scale=c.decoder.head_size**-0.5)


@pytest.mark.parametrize(
    "fault", [wrong_window, wrong_layers_with_windows, one_rotation_for_all_layers, wrong_scale]
)
def test_planted_fault_is_found(
    fault: Callable[[GemmaConfig], GemmaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gemma_describe, gemma_model):
        monkeypatch.setattr(module, "read_gemma3", lambda config: fault(read_gemma3(config)))
    with pytest.raises(AssertionError, match="in transformers"):
        gemma().test_logits_equal_transformers()


def test_architecture_that_transformers_cannot_build_is_not_run() -> None:
    with pytest.raises(NotRun, match="Gemma3ForConditionalGeneration in transformers"):
        suite(spec=GEMMA3_MULTIMODAL, config={}).test_logits_equal_transformers()
