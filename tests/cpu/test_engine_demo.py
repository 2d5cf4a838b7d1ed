"""The scores of the demo model through `LLM`."""

from __future__ import annotations

from typing import Any

import pytest
from tokenspeed_demo.items import REQUIRED
from tokenspeed_demo.score import CHECKPOINT, in_process, score

NUM_ITEMS = 24  # of each task; one that is wrong is 4 %


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param(
            {
                "max_total_tokens": 2048,
                "chunked_prefill_size": 64,
                "max_num_seqs": 16,
                "max_model_len": 1024,
            },
            marks=pytest.mark.release,
        ),
        pytest.param(
            {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}, marks=pytest.mark.release
        ),
    ],
    ids=["default", "small chunks in a small pool", "eight bits"],
)
def test_demo_scores_stay(settings: dict[str, Any]) -> None:
    results = score(in_process(CHECKPOINT, settings), list(REQUIRED), NUM_ITEMS, show_wrong=3)
    missed = {
        task: result["exact"]
        for task, result in results.items()
        if result["exact"] < result["required"]
    }
    assert not missed
