"""Measured rankings of backends.

benchmarks/rank_attention.py writes those of attention, benchmarks/rank_kernels.py those of other ops.
"""

from __future__ import annotations

from tokenspeed_core.api import Ranking

RANKINGS = (
    Ranking(
        "attention",
        "prefill",
        (9, 0),
        (
            ("fa3", "qwen3-8b on NVIDIA H200: prefill 6.54 s"),
            ("triton", "qwen3-8b on NVIDIA H200: prefill 6.80 s"),
        ),
    ),
    Ranking(
        "attention",
        "decode",
        (9, 0),
        (
            (
                "triton",
                "qwen3-8b on NVIDIA H200: agentic 9.06 s, latency 1.30 s, throughput 6.79 s",
            ),
            ("fa3", "qwen3-8b on NVIDIA H200: agentic 9.49 s, latency 1.30 s, throughput 7.33 s"),
        ),
    ),
)
