"""Triton attention on fixed buffers that are refilled between calls, as for replays of captured steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenspeed_kernels_blackwell import PREFILL
from tokenspeed_testing.replays import Replay, replays

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.worker.staged import BucketSize
from tokenspeed_kernels.descriptors import TRITON_ATTENTION

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about log2(0).
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")
MANY, FEW = BucketSize(10, 0, 0), BucketSize(2, 0, 0)
MIXED, CHUNKS = BucketSize(3, 2, 24), BucketSize(0, 2, 8)
DECODES = (
    Replay(MANY, (300, 270, 290, 277, 333, 301, 260, 299, 280), num_shared=256),
    Replay(FEW, (7, 70)),
    Replay(MANY, (33, 1, 65)),
)
PROMPTS_TOO = (
    Replay(MIXED, (140, 129, 131), ((17, 150), (3, 140)), num_shared=128),
    Replay(CHUNKS, chunks=((5, 5), (1, 30))),
    Replay(MIXED, (64,), ((20, 20),)),
)


@pytest.mark.parametrize("window", [None, pytest.param(20, marks=pytest.mark.release)])
@pytest.mark.parametrize(
    ("spec", "phase"),
    [(TRITON_ATTENTION[0], "decode"), (TRITON_ATTENTION[0], "prefill"), (PREFILL, "prefill")],
    ids=["decodes", "mixed steps", "prompts of blackwell"],
)
def test_replay_reads_new_rows_from_the_same_buffers(
    spec: KernelSpec, phase: str, window: int | None
) -> None:
    num_kv_heads = 2 if spec is PREFILL else 1  # the interpreter is slow
    problem = AttentionProblem(
        phase, 2 * num_kv_heads, num_kv_heads, 64, "float32", "float32", 64, 0.125, window
    )
    capability = replace(spec.capability, dtypes=("float32",), kv_dtypes=("float32",))
    replays(
        replace(spec, capability=capability),
        problem,
        CPU,
        DECODES if phase == "decode" else PROMPTS_TOO,
    )
