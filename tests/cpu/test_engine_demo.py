"""The scores of the demo models through `LLM`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenspeed_demo import CHECKPOINT, DEEPSEEK
from tokenspeed_demo.items import REQUIRED
from tokenspeed_demo.score import in_process, score

from tokenspeed_core.api import Checkpoint

SMALL = {
    "max_total_tokens": 2048,
    "chunked_prefill_size": 64,
    "max_num_seqs": 16,
    "max_model_len": 1024,
}


@pytest.mark.parametrize(
    ("checkpoint", "num_items", "settings"),
    [
        (CHECKPOINT, 6, {}),
        pytest.param(CHECKPOINT, 24, {}, marks=pytest.mark.release),
        pytest.param(DEEPSEEK, 2, SMALL, marks=pytest.mark.release),
        pytest.param(CHECKPOINT, 24, SMALL, marks=pytest.mark.release),
        pytest.param(DEEPSEEK, 48, {}, marks=pytest.mark.release),
        pytest.param(
            CHECKPOINT,
            24,
            {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
            marks=pytest.mark.release,
        ),
    ],
    ids=[
        "default",
        "more of the default",
        "deepseek",
        "small chunks in a small pool",
        "more of deepseek",
        "eight bits",
    ],
)
def test_demo_scores_do_not_regress(
    checkpoint: Checkpoint, num_items: int, settings: dict[str, Any]
) -> None:
    answer = in_process(Path(checkpoint.path), settings)
    results = score(answer, list(REQUIRED), num_items, show_wrong=3)
    allowed = 1 / num_items  # one wrong answer is not a worse model
    missed = {
        task: result["exact"]
        for task, result in results.items()
        if result["exact"] < result["required"] - allowed
    }
    assert not missed
