"""Targets on H200s: vLLM's figure, our minimum and goal, and the lower bound, per row. Group "tp" uses two GPUs.

vLLM 0.26.0, torch 2.11.0+cu130, dummy weights, greedy, the same traffic, best of 3 (2026-11-20).
Lower bounds are bytes over 4.5 TB/s or FLOPs over 804 TFLOP/s (BF16) and 1,500 TFLOP/s (FP8), rates
measured on that GPU. The BF16 throughput bound is 2.3 s of prefill plus 256 steps of 1.9 ms for
weights and 5.4 ms for the KV cache. The bound for 64 users is 64 prompts of 0.28 ms plus 128 steps
of 0.79 ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed_bench.traffic import parameters_of

DEVICE = "H200"  # the targets apply to devices with this in their name
START = {"name": "start"}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the tables. `metric` names a figure of a run; for rates more is better, for times less."""

    group: str
    kind: str
    shape: str
    traffic: Mapping[str, Any]
    metric: str
    peer: float | None = None
    must: float | None = None
    aim: float | None = None
    floor: float | None = None
    users: int | None = None
    quantization: str | None = None
    num_processes: int = 1  # --tensor-parallel-size

    def is_rate(self) -> bool:
        """Return whether more is better."""
        return self.metric.endswith("_per_s")

    def name(self) -> str:
        """Return the row's display name."""
        who = "" if self.users is None else f" {self.users} user" + "s" * (self.users != 1)
        form = f" {self.quantization}" if self.quantization else ""
        what = "" if self.traffic["name"] == "load" else f" {self.traffic['name']}"
        return f"{self.shape}{form}{who}{what}"

    def ratio(self, value: float) -> float | None:
        """Return the value as a multiple of the lower bound (1 is optimal), or None without a bound."""
        if self.floor is None or value <= 0:
            return None
        return round(self.floor / value if self.is_rate() else value / self.floor, 3)

    def verdict(self, value: float) -> str:
        """Return "aim", "must" or "MISSED", or "" for a row without targets."""

        def reaches(goal: float | None) -> bool:
            return goal is not None and (value >= goal if self.is_rate() else value <= goal)

        if self.must is None and self.aim is None:
            return ""
        return "aim" if reaches(self.aim) else "must" if reaches(self.must) else "MISSED"


def _offline(
    group: str,
    shape: str,
    name: str,
    metric: str,
    peer: float | None = None,
    must: float | None = None,
    aim: float | None = None,
    floor: float | None = None,
) -> Row:
    traffic = START if name == "start" else {"name": name, **parameters_of(name)}
    return Row(
        *(group, "offline", shape, traffic, metric, peer, must, aim, floor),
        quantization="fp8" if group == "fp8" else None,
        num_processes=2 if group == "tp" else 1,
    )


def _http(
    users: int,
    requests: int,
    in_len: int,
    metric: str,
    peer: float,
    must: float | None = None,
    aim: float | None = None,
    floor: float | None = None,
) -> Row:
    traffic = {
        "name": "load",
        "requests": requests,
        "in_len": in_len,
        "out_len": 128,
        "fixed": False,
    }
    return Row("http", "serve", "qwen3-0.6b", traffic, metric, peer, must, aim, floor, users)


ROWS: tuple[Row, ...] = (
    _offline("bf16", "qwen3-8b", "latency", "ms_per_output", 5.23, 4.3, 4.0, 3.37),
    _offline("bf16", "qwen3-8b", "throughput", "out_per_s", 9462, 10900, 12000, 65536 / 4.5),
    _offline("bf16", "qwen3-8b", "prefill", "prompt_per_s", 40415, 43500, 46000, 262144 / 4.9),
    _offline("bf16", "qwen3-8b", "agentic", "s", 8.56, 7.0, 6.0, 5.1),
    _offline("bf16", "qwen3-8b", "start", "s", 182, 45, 20),
    _offline("fp8", "qwen3-8b", "latency", "ms_per_output", 3.71, 3.1, 2.6, 1.9),
    _offline("fp8", "qwen3-8b", "throughput", "out_per_s", 12322, 14000, 16500, 65536 / 3.1),
    _offline("fp8", "qwen3-8b", "prefill", "prompt_per_s", 60022, 64000, 69000, 262144 / 2.9),
    _http(1, 16, 128, "itl_p50_ms", 1.95, 1.1, 0.8, 0.27),
    _http(1, 16, 128, "ttft_p50_ms", 15.1, 8, 5, 0.27),
    _http(64, 512, 256, "out_per_s", 14321, 28000, 35000, 69000),
    _http(256, 2048, 256, "out_per_s", 18301, 42000, 52000, 79000),
    _http(256, 2048, 256, "itl_p99_ms", 32.7, 15),
    Row("http", "serve", "qwen3-0.6b", START, "s", 186, 30, 15),
    _offline("moe", "qwen3-30b-a3b", "latency", "ms_per_output", 4.16, 2.6, 2.0, 1.35),
    _offline("moe", "qwen3-30b-a3b", "throughput", "out_per_s", 8411, 9800, 11000, 12200),
    _offline("moe", "qwen3-30b-a3b", "prefill", "prompt_per_s", 63723, 72000, 85000),
    _offline("moe", "qwen3-30b-a3b", "agentic", "s", 12.57, 5.4, 4.8),
    _offline("mla", "deepseek-v2-lite", "latency", "ms_per_output", 3.41, 2.2, 1.6, 1.09),
    _offline("mla", "deepseek-v2-lite", "throughput", "out_per_s", 19367, 22000, 26000),
    _offline("mla", "deepseek-v2-lite", "prefill", "prompt_per_s", 88685, 98000, 120000),
    _offline("mla", "deepseek-v2-lite", "agentic", "s", 5.16, 3.9, 3.2),
    _offline("mla", "deepseek-v2-lite", "start", "s", 147, 30, 15),
    _offline("tp", "qwen3-32b", "latency", "ms_per_output", 11.01, 8.9, 8.0, 7.1),
    _offline("tp", "qwen3-32b", "throughput", "out_per_s", 4870, 5600, 6200),
    _offline("tp", "qwen3-32b", "prefill", "prompt_per_s", 17277, 19000, 21000, 25000),
    _offline("tp", "qwen3-32b", "agentic", "s", 15.03, 12.0, 10.5),
    _offline("tp", "qwen3-32b", "start", "s", 63.5, 40, 25),
)
GROUPS = tuple(dict.fromkeys(row.group for row in ROWS))
HTTP_LOADS = {
    "users": (1, 64, 256),
    "requests": (16, 512, 2048),
    "in_len": (128, 256, 256),
    "out_len": (128,),
}


def rows_of(result: Mapping[str, Any], run: Mapping[str, Any]) -> Sequence[Row]:
    """Return the rows that match a run: same shape, quantization, traffic and device."""
    if DEVICE not in str(result.get("device", "")):
        return ()
    settings = result.get("settings", {})
    quantization = settings.get("quantization")
    num_processes = int(settings.get("tensor_parallel_size", 1))
    return [
        row
        for row in ROWS
        if row.kind == result["kind"]
        and row.shape == result.get("shape")
        and row.quantization == quantization
        and row.num_processes == num_processes
        and row.traffic == run["traffic"]
        and row.users == run.get("pace", {}).get("users")
        and run.get("pace", {}).get("rate") is None
        and row.metric in run["figures"]
    ]
