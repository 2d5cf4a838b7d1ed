"""Sampling parameters: forms that are read, and errors."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tokenspeed_core import BadRequestError, SamplingParams


def test_stop_may_be_one_string() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("given", "param", "shown"),
    [
        ({"temprature": 1}, "temprature", "temperature"),
        ({"max_tokens": "many"}, "max_tokens", "'many'"),
        ({"n": 0}, "n", "1"),
        ({"stop": ["a", ""]}, "stop", r"stop\[1\]"),
        ({"stop": 5}, "stop", "5"),
        ({"stop": "x" * 999}, "stop", "256"),
        ({"logit_bias": {3: 500}}, "logit_bias", "500"),
        ({"seed": object()}, "seed", "seed"),
    ],
)
def test_invalid_parameter_is_named(given: dict[str, Any], param: str, shown: str) -> None:
    with pytest.raises(BadRequestError, match=shown) as caught:
        SamplingParams(**given)
    assert caught.value.param == param
    assert "http" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_model_validate_keeps_pydantics_error() -> None:
    with pytest.raises(ValidationError):
        SamplingParams.model_validate({"n": 0})


def test_repr_shows_changed_parameters() -> None:
    params = SamplingParams(temperature=0.5, stop="END", logit_bias={3: 1})
    assert repr(SamplingParams()) == "SamplingParams()"
    assert eval(repr(params)) == params
