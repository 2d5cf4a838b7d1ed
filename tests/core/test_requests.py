"""Sampling parameters become engine requests with defaults and checked bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.engine.inputs import InputProcessor, ModelText
from tokenspeed_core.engine.messages import Ready, Submit, to_engine
from tokenspeed_core.engine.requests import Defaults, RequestOptions, check_text_fits
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.errors import BadRequestError, CheckpointError
from tokenspeed_core.text.tokenizer import Tokenizer


def make_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer that was trained on a few words."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello ab ab", "x" * 64] * 9, trainer)
    return Tokenizer(backend, {})


TOKENIZER = make_tokenizer()
LIMITS = Ready(max_model_len=100, num_kv_tokens=80, vocab_size=50, report="")
DEFAULTS = Defaults(
    temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, eos_token_ids=(7, 9)
)


def build(prompt: list[int], limits: Ready = LIMITS, **params: Any) -> Submit:
    inputs = InputProcessor(ModelText(TOKENIZER, None, DEFAULTS), limits)
    return inputs.request(4, SamplingParams(**params), np.array(prompt, np.int32))


def test_omitted_parameters_take_the_models_defaults() -> None:
    submit = to_engine.unpack(pack(build([1, 2])))
    assert (submit.temperature, submit.top_p, submit.top_k, submit.min_p) == (0.6, 0.9, 20, 0.0)
    assert submit.max_tokens == 78
    assert submit.stop_token_ids.tolist() == [7, 9]
    assert (submit.seed, submit.logprobs) == (None, -1)


def test_given_parameters_override_defaults() -> None:
    submit = build(
        [1],
        temperature=0,
        top_k=-1,
        stop_token_ids=(3,),
        logit_bias={5: 2},
        ignore_eos=True,
        logprobs=0,
    )
    assert (submit.temperature, submit.top_k, submit.logprobs) == (0.0, 0, 0)
    assert submit.stop_token_ids.tolist() == [3]
    assert (submit.bias_ids.tolist(), submit.bias_values.tolist()) == ([5], [2.0])


@pytest.mark.parametrize(
    ("prompt", "params", "param", "expected"),
    [
        ([], {}, "prompt", "empty"),
        ([1] * 80, {}, "prompt", "80 tokens.*at most 79"),
        ([1] * 70, {"max_tokens": 11}, "max_tokens", "together 81.*at most 10"),
        ([1, 50], {}, "prompt", "50 at position 1.*0 to 49"),
        ([-1], {}, "prompt", "-1"),
        ([1], {"logit_bias": {50: 1}}, "logit_bias", "50"),
        ([1], {"stop_token_ids": (99,)}, "stop_token_ids", "99"),
    ],
)
def test_invalid_request_names_the_field_and_bound(
    prompt: list[int], params: dict[str, Any], param: str, expected: str
) -> None:
    with pytest.raises(BadRequestError, match=expected) as caught:
        build(prompt, **params)
    assert caught.value.param == param


def test_prompt_of_a_bidirectional_model_is_not_scored() -> None:
    limits = Ready(100, 80, 50, "", is_bidirectional=True)
    assert build([1, 2], limits, logprobs=1).logprobs == 1
    with pytest.raises(BadRequestError, match="prompt_logprobs") as caught:
        build([1, 2], limits, prompt_logprobs=0)
    assert caught.value.param == "prompt_logprobs"


def test_context_length_is_named() -> None:
    with pytest.raises(BadRequestError, match="context length is 100 tokens"):
        build([1] * 100, Ready(100, 1000, 50, ""))


def test_generation_config_sets_defaults_and_eos() -> None:
    generation = {
        "temperature": 0.6,
        "top_k": None,
        "eos_token_id": [1, 2],
        "do_sample": True,
        "pad_token_id": 3,
    }
    assert Defaults.of(generation, (2, 5)) == Defaults(temperature=0.6, eos_token_ids=(2, 5, 1))
    assert Defaults.of({"eos_token_id": 4}, ()).eos_token_ids == (4,)


@pytest.mark.parametrize(
    "generation",
    [
        {"temperature": 1, "top_k": 50.0, "eos_token_id": 2.0},
        {"temperature": "1", "top_k": "50", "eos_token_id": ["2"]},
    ],
)
def test_generation_config_numbers_are_converted(
    generation: dict[str, Any],
) -> None:
    inputs = InputProcessor(ModelText(None, None, Defaults.of(generation, ())), LIMITS)
    submit = inputs.request(4, SamplingParams(), np.array([1], np.int32))
    received = to_engine.unpack(pack(submit))
    assert (received.temperature, received.top_k, received.stop_token_ids.tolist()) == (
        1.0,
        50,
        [2],
    )


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"top_p": 3.0}, "top_p is 3.0: "),
        ({"top_k": 50.5}, "top_k is 50.5: "),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>': "),
        ({"eos_token_id": [2, None]}, "eos_token_id is [2, None]: "),
        ({"eos_token_id": 2**40}, "eos_token_id is 1099511627776: "),
        ({"eos_token_id": {"a": 1}}, "eos_token_id is {'a': 1}: "),
    ],
)
def test_bad_generation_config_names_the_key(generation: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Defaults.of(generation, ())
    assert str(caught.value).startswith(f"generation_config.json: {expected}")


WORDS = st.lists(
    st.sampled_from(["a", " ab", "hello ", "é", "\n", "x" * 40, "日本", " "]), max_size=400
)


@settings(max_examples=200, deadline=None)
@given(words=WORDS, longest=st.integers(1, 60))
def test_texts_that_fit_are_never_refused(words: list[str], longest: int) -> None:
    text, limits = "".join(words), Ready(longest, longest, 50, "")
    num_tokens = TOKENIZER.count(text)
    assert num_tokens == len(TOKENIZER.encode(text, add_special_tokens=False))
    if num_tokens <= longest:
        check_text_fits(TOKENIZER, text, limits)
        return
    # Only beginnings of these lengths are counted, and their last tokens are not final.
    lengths = [length for k in range(6) if (length := 8 * longest * 4**k) < len(text)]
    if any(TOKENIZER.count(text[:length]) > longest + longest // 8 + 64 for length in lengths):
        with pytest.raises(BadRequestError) as caught:
            check_text_fits(TOKENIZER, text, limits)
        assert caught.value.code == "context_length_exceeded"


def test_long_text_is_encoded_only_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count = TOKENIZER.count
    monkeypatch.setattr(TOKENIZER, "count", lambda text: counted.append(len(text)) or count(text))
    with pytest.raises(BadRequestError, match="messages"):
        check_text_fits(TOKENIZER, "ab " * 50_000, Ready(1000, 1000, 50, ""), "messages")
    with pytest.raises(BadRequestError):
        check_text_fits(TOKENIZER, "a" * 1_000_000, Ready(1000, 1000, 50, ""))
    assert counted == [8000]


@pytest.mark.parametrize(
    ("params", "options", "param"),
    [
        ({"stop": ("x",)}, RequestOptions(), "stop"),
        ({}, RequestOptions(priority=1), "priority"),
    ],
)
def test_request_needs_what_the_engine_has(
    params: dict[str, Any], options: RequestOptions, param: str
) -> None:
    prompt = np.array([1], np.int32)
    with pytest.raises(BadRequestError) as caught:
        InputProcessor(ModelText(None, None), LIMITS).request(
            4, SamplingParams(**params), prompt, options
        )
    assert caught.value.param == param
    inputs = InputProcessor(ModelText(TOKENIZER, None), LIMITS, has_priorities=True)
    submit = inputs.request(4, SamplingParams(n=2, **params), prompt, options)
    assert (submit.priority, list(submit.sequence_ids)) == (options.priority, [4, 5])
