"""Time tilings of the Triton attention kernel, to choose the fixed ones.

    python benchmarks/attention_tilings.py [--cases drafts decode prefill] [--match "1 x 1024"]

Prints the tilings of each case from fastest to slowest. Rows in "drafts" verify draft tokens, in steps that look like
captured ones. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import BLOCK_SIZE, D, H, K, attention_step
from kernels import time_of

from tokenspeed_core.api.attention import AttentionLimits, AttentionProblem
from tokenspeed_kernels.triton.attention.backend import Tiling, TritonAttention

DECODE = [
    Tiling(16, n, warps, stages) for n, warps, stages in product((32, 64, 128), (2, 4), (2, 3, 4))
]
DRAFTS = [
    Tiling(16, 64, warps, 3, min_split, num_merged)
    for (warps, num_merged), min_split in product(
        ((2, 4), (4, 4), (2, 8), (4, 8), (4, 16), (4, 32)), (64, 128, 256)
    )
]
PREFILL = [
    Tiling(m, n, warps, stages)
    for (m, warps), n, stages in product(((64, 4), (128, 8)), (32, 64, 128), (2, 3))
]
CASES = {
    "drafts": [
        (f"{rows} x {length}, {num_query} queries", [num_query] * rows, [length] * rows)
        for rows, length in ((1, 1024), (1, 32768), (16, 1024), (64, 1024))
        for num_query in (1, 5, 9)
    ],
    "decode": [
        ("64 x 2048", [1] * 64, [2048] * 64),
        ("256 x 640", [1] * 256, [640] * 256),
        ("1 x 32768", [1], [32768]),
    ],
    "prefill": [("8 x 4096", [4096] * 8, [4096] * 8)],
}
MAX_MODEL_LEN = 40960
TILINGS = {"drafts": DRAFTS, "decode": DECODE, "prefill": PREFILL}


def main() -> None:
    """Time every tiling of every case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), choices=CASES, help="groups of cases to time"
    )
    parser.add_argument("--match", default="", help="time only cases with this text in their name")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, and torch finds none")
    device = torch.device("cuda")
    for kind in options.cases:
        phase = "prefill" if kind == "prefill" else "decode"
        max_model_len = MAX_MODEL_LEN if kind == "drafts" else 0
        problem = AttentionProblem(
            phase, H, K, D, "bfloat16", "bfloat16", BLOCK_SIZE, D**-0.5, None
        )
        for name, num_queries, seq_lens in CASES[kind]:
            if options.match not in name:
                continue
            step, num_blocks = attention_step(
                num_queries, seq_lens, device, max_model_len=max_model_len
            )
            arena = torch.randn(
                (num_blocks, 2, BLOCK_SIZE, K, D), dtype=torch.bfloat16, device=device
            )
            q = torch.randn((step.num_tokens, H, D), dtype=torch.bfloat16, device=device)
            out = torch.empty_like(q)
            limits = AttentionLimits(
                step.num_rows, step.num_tokens, step.max_seq_len, step.block_table.shape[1]
            )
            results = []
            for tiling in TILINGS[kind]:
                kernel = TritonAttention(problem, limits, device, tiling, tiling)
                kernel.prepare(step)
                try:
                    seconds = time_of(
                        partial(kernel.forward, q, arena[:, 0], arena[:, 1], out), runs=8
                    )
                except Exception as error:  # the tiling does not fit the device
                    print(f"{tiling}: {type(error).__name__}", flush=True)
                    continue
                results.append((seconds, tiling))
            print(f"{kind} {name}")
            for seconds, tiling in sorted(results, key=lambda r: r[0])[:8]:
                print(f"  {seconds * 1e6:9.1f} us  {tiling}", flush=True)


if __name__ == "__main__":
    main()
