"""The outputs of a sequence do not depend on how its tokens are grouped into steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tokenspeed_core.api.sampling import FinishReason, SamplingParams
from tokenspeed_core.engine.messages import TokenLogprobs
from tokenspeed_core.engine.outputs import SequenceCollector


class Letters:
    """A tokenizer of one letter for each token."""

    def detokenizer(self, **_: Any) -> Letters:
        return self

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(97 + token_id) for token_id in token_ids)

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("stop", [(), ("cd",), ("h",)])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_output_is_independent_of_step_sizes(stop: tuple[str, ...], is_streamed: bool) -> None:
    params = SamplingParams(stop=stop, logprobs=0, max_tokens=8)
    outputs = []
    for num in (1, 2, 3, 8):
        letters: Any = Letters()
        collector = SequenceCollector(params, letters, is_streamed=is_streamed)
        for start in range(0, 8, num):
            ids = list(range(start, min(8, start + num)))
            finish = FinishReason.LENGTH if ids[-1] == 7 else FinishReason.NOT
            values = [-float(token_id) for token_id in ids]
            columns = TokenLogprobs(values, [1] * len(ids), [[]] * len(ids))
            if collector.take(ids, finish, 0, columns):
                break
        outputs.append(collector.output(0))
    assert all(each == outputs[0] for each in outputs)
    assert outputs[0].token_ids == list(range(4 if stop == ("cd",) else 8))
    assert outputs[0].logprobs is not None
    assert len(outputs[0].logprobs) == len(outputs[0].token_ids)
