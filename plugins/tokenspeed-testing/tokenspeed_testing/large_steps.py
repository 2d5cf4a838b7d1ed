"""Attention steps of the size that a server runs: long contexts, wide chunks, many rows.

The shapes of `attention.py` are small, so that every declared combination can run. Faults that
show only at scale (an index that overflows, a loop that stops early, a softmax without its
maximum) need the steps here. They run for one declared problem per phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.kernels.refusals import problem_refusals
from tokenspeed_testing.attention import attend, attention_problems, compare
from tokenspeed_testing.fixtures import Rows, limits_of, make_fixture

HIGH_BLOCK = 5000  # the first block id of a step with high ids


@dataclass(frozen=True, slots=True)
class LargeStep:
    """A step that is large in one respect."""

    name: str
    rows: Rows
    first_block: int = 0
    query_scale: float = 1.0
    last_value: float = 0.0


DECODES = (
    LargeStep("long contexts", Rows((1,) * 5, (33_000, 9_000, 2_100, 1_100, 5)), last_value=1000.0),
    LargeStep("70 rows", Rows((1,) * 70, tuple(1 + 7 * row % 90 for row in range(70)))),
    LargeStep("300 rows", Rows((1,) * 300, tuple(1 + 7 * row % 90 for row in range(300)))),
    LargeStep("high block ids", Rows((1,) * 3, (90, 17, 200)), first_block=HIGH_BLOCK),
    LargeStep("large scores", Rows((1,) * 3, (40, 300, 7)), query_scale=60.0),
)
CHUNKS = (
    LargeStep("wide chunks", Rows((1, 600, 520), (50, 600, 900))),
    LargeStep("long contexts", Rows((3, 40, 9), (33_000, 9_000, 2_100)), last_value=1000.0),
    LargeStep("300 rows", Rows((1,) * 60 + (3,) * 240, tuple(3 + 7 * i % 60 for i in range(300)))),
    LargeStep("high block ids", Rows((1, 30), (90, 200)), first_block=HIGH_BLOCK),
    LargeStep("large scores", Rows((1, 30), (300, 40)), query_scale=60.0),
)


def check_large_steps(spec: KernelSpec, device: torch.device) -> int:
    """Run the large steps on an attention backend; return their number.

    Raises AssertionError naming the problem and the step.
    """
    factory = spec.factory()
    num_steps = 0
    for problem in large_problems(spec):
        for step in DECODES if problem.phase == "decode" else CHUNKS:
            fixture = make_fixture(
                problem,
                step.rows,
                device,
                seed=0,
                first_block=step.first_block,
                query_scale=step.query_scale,
                last_value=step.last_value,
            )
            found = attend(factory(problem, limits_of(fixture), device), fixture)
            compare(f"{step.name}: {problem}", problem, found, fixture.expected)
            num_steps += 1
    return num_steps


def large_problems(spec: KernelSpec) -> Iterator[AttentionProblem]:
    """Yield one declared problem per phase, with the fewest KV heads, to bound memory.

    A 16-bit dtype is preferred: its products are exact in the matrix units of a GPU, so large
    scores need no wider tolerance.
    """
    seen: set[str] = set()
    problems = sorted(attention_problems(spec), key=lambda problem: problem.dtype == "float32")
    for problem in problems:
        if problem.phase in seen or problem.kv_dtype != problem.dtype:
            continue
        narrow = replace(problem, num_heads=4, num_kv_heads=1, window=None)
        chosen = problem if any(problem_refusals(spec.capability, asdict(narrow))) else narrow
        seen.add(problem.phase)
        yield chosen
