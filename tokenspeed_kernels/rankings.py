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
    Ranking(
        "mla_decode",
        "decode",
        (9, 0),
        (
            (
                "flashmla",
                "1.00 times the best time, geometric mean of 64 sizes with 16 to 128 heads on NVIDIA H200",
            ),
            (
                "triton",
                "1.76 times the best time, geometric mean of 64 sizes with 16 to 128 heads on NVIDIA H200",
            ),
        ),
    ),
    Ranking(
        "moe_experts",
        None,
        (9, 0),
        (
            (
                "triton",
                "1.00 times the best time, geometric mean of 10 sizes on NVIDIA H100 80GB HBM3, commit 0d79f9f3",
            ),
            (
                "torch",
                "33.76 times the best time, geometric mean of 10 sizes on NVIDIA H100 80GB HBM3 without CUDA graphs, commit 0d79f9f3",
            ),
        ),
    ),
    Ranking(
        "moe_experts_fp8",
        None,
        (9, 0),
        (
            (
                "triton",
                "1.00 times the best time, geometric mean of 10 sizes on NVIDIA H100 80GB HBM3, commit 0d79f9f3",
            ),
            (
                "torch",
                "97.19 times the best time, geometric mean of 10 sizes on NVIDIA H100 80GB HBM3 without CUDA graphs, commit 0d79f9f3",
            ),
        ),
    ),
    Ranking(
        "moe_experts_int8",
        None,
        (9, 0),
        (
            (
                "triton",
                "1.00 times the best time, geometric mean of 10 sizes on NVIDIA H100 80GB HBM3, commit 0d79f9f3",
            ),
            (
                "torch",
                "90.18 times the best time, geometric mean of 10 sizes on NVIDIA H100 80GB HBM3 without CUDA graphs, commit 0d79f9f3",
            ),
        ),
    ),
    Ranking(
        "moe_experts_w4a16",
        None,
        (9, 0),
        (
            (
                "triton",
                "1.00 times the best time, geometric mean of 10 sizes on NVIDIA H100 80GB HBM3, commit 0d79f9f3",
            ),
            (
                "torch",
                "89.68 times the best time, geometric mean of 10 sizes on NVIDIA H100 80GB HBM3 without CUDA graphs, commit 0d79f9f3",
            ),
        ),
    ),
    Ranking(
        "moe_biased_experts_mxfp4",
        None,
        (9, 0),
        (
            (
                "triton",
                "1.00 times the best time, geometric mean of 5 sizes on NVIDIA H100 80GB HBM3, commit 0d79f9f3",
            ),
            (
                "torch",
                "42.79 times the best time, geometric mean of 5 sizes on NVIDIA H100 80GB HBM3 without CUDA graphs, commit 0d79f9f3",
            ),
        ),
    ),
    Ranking(
        "moe_experts_fp8_block",
        None,
        (9, 0),
        (
            (
                "triton",
                "1.00 times the best time, geometric mean of 15 sizes on NVIDIA H100 80GB HBM3, commit 0d79f9f3",
            ),
            (
                "torch",
                "83.11 times the best time, geometric mean of 15 sizes on NVIDIA H100 80GB HBM3 without CUDA graphs, commit 0d79f9f3",
            ),
        ),
    ),
)
