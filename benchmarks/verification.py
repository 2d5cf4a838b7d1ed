"""Time steps that verify draft tokens, plain steps, and one user with a drafter that is right with 70 % probability.

    python benchmarks/verification.py                  # qwen3-8b on a GPU, less than 240 seconds
    python benchmarks/verification.py --shape small    # anywhere

First the outputs of a small float32 model must be equal with and without draft tokens. Then each line of output is
JSON: `step_ms` is the median time of a step of some rows with `drafts` draft tokens each (two or more steps in
flight, by CUDA events), `floor_ms` the bytes that it must read (weights once, keys and values of each row once) over
`--bandwidth`, and `ratio` its time over that of a step without draft tokens. The last lines are ms per token of one
user in `LLM`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import last_token_weights
import numpy as np
import torch
from runner_step import prefilled
from tokenspeed_bench.result import machine
from tokenspeed_bench.shapes import SHAPES, write
from tokenspeed_testing.drafts import FixedDepth, install_forced
from tokenspeed_testing.plans import PlanMaker

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api.step import StepPlan
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.local import LocalRunner, build

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
MAX_DRAFTS = 8


class Clock:
    """Times of launched steps: CUDA events on the runner's stream, or the host's clock without a GPU."""

    def __init__(self, runner: LocalRunner) -> None:
        self._stream = runner._stream
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the end of the work that was launched so far."""
        if self._stream is None:
            self._marks.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._marks.append(event)

    def median_ms(self) -> float:
        """Return the median time between marks."""
        if self._stream is None:
            times = [1e3 * (end - begin) for begin, end in pairwise(self._marks)]
        else:
            self._stream.synchronize()
            times = [begin.elapsed_time(end) for begin, end in pairwise(self._marks)]
        median: float = statistics.median(times)
        return median


def start(folder: Path, rows: list[int], context: int, max_steps: int) -> LocalRunner:
    """Build a runner for verification, with captured steps of these rows."""
    catalog = Catalog.discover()
    resolved = resolve(
        Config.from_keywords(
            model=str(folder),
            load_format="dummy",
            max_num_seqs=max(rows),
            chunked_prefill_size=8192,
            cudagraph_capture_sizes=tuple(rows),
            max_total_tokens=max(rows) * (context + max_steps + 64),
            speculative_algorithm="ngram",
            speculative_num_draft_tokens=1 + MAX_DRAFTS,
        ),
        catalog,
    )
    limits = replace(resolved.limits, max_model_len=min(8192, resolved.limits.max_model_len))
    return build(replace(resolved, limits=limits), catalog, lambda what, done, total: None)


def with_drafts(plan: StepPlan, num_drafts: int, vocab_size: int) -> StepPlan:
    """Return a plan with rows that verify random tokens."""
    if not num_drafts:
        return plan
    total = num_drafts * plan.num_rows
    token_ids = np.random.default_rng(plan.step_id).integers(0, vocab_size, total).astype(np.int32)
    counts = plan.num_query_tokens + np.int32(num_drafts)
    return replace(plan, num_query_tokens=counts, num_draft_tokens=total, draft_token_ids=token_ids)


def step_ms(
    runner: LocalRunner, maker: PlanMaker, names: list[str], num_drafts: int, steps: int
) -> float:
    """Return the median time of a step, of which two are in flight."""
    clock, flying = Clock(runner), []
    for _ in range(steps):
        plan = with_drafts(maker.plan(names), num_drafts, runner.resolved.limits.vocab_size)
        runner.forward(plan)
        runner.sample(plan.step_id, None)
        clock.mark()
        flying.append(plan.step_id)
        if len(flying) > 2:
            runner.collect(flying.pop(0))
    for step_id in flying:
        runner.collect(step_id)
    return clock.median_ms()


def time_steps(folder: Path, options: argparse.Namespace) -> None:
    """Time all steps, and print them."""
    max_steps = options.steps * (len(options.drafts) + 2)
    runner = start(folder, options.rows, options.context, max_steps)
    resolved = runner.resolved
    width = getattr(torch, resolved.config.dtype).itemsize
    weights = resolved.checkpoint.info.num_parameters * width
    per_token = sum(group.bytes_per_token for group in runner.layout.groups)
    for num_rows in options.rows:
        maker, names = prefilled(runner, num_rows, options.context, 0.0)
        step_ms(runner, maker, names, 0, 5)
        plain = step_ms(runner, maker, names, 0, options.steps)
        for num_drafts in (0, *options.drafts):
            took = step_ms(runner, maker, names, num_drafts, options.steps) if num_drafts else plain
            num_bytes = weights + num_rows * options.context * per_token
            row = {
                "rows": num_rows,
                "drafts": num_drafts,
                "step_ms": round(took, 3),
                "ratio": round(took / plain, 3),
                "floor_ms": round(1e3 * num_bytes / options.bandwidth, 3),
            }
            print(json.dumps(row), flush=True)
    runner.close()


class User:
    """One user of an `LLM`."""

    def __init__(
        self,
        folder: Path,
        num_tokens: int,
        drafting: dict[str, Any] | None,
        load_format: str = "dummy",
    ) -> None:
        """Start the model, with a drafter if its settings are given."""
        given: dict[str, Any] = {} if drafting is None else {"speculative_config": drafting}
        self.llm = LLM(
            str(folder), load_format=load_format, max_num_seqs=4, max_total_tokens=8192, **given
        )
        self.num_tokens = num_tokens

    def ask(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        """Return prompts with their outputs, and the seconds."""
        self.llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=self.num_tokens, ignore_eos=True)
        given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        outputs = self.llm.generate(given, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        return [
            [*prompt, *output.outputs[0].token_ids]
            for prompt, output in zip(prompts, outputs, strict=True)
        ], seconds

    def accepted(self) -> tuple[int, int, int]:
        """Return the draft tokens and accepted ones so far, and the steps of a row that verified some."""
        stats = self.llm.stats()
        return stats.num_draft_tokens, sum(stats.num_accepted), stats.num_draft_rows


def drafting(answers: Path, acceptance: float, max_drafts: int) -> dict[str, Any]:
    """Return the settings of the forced drafter."""
    return {
        "method": "forced",
        "num_speculative_tokens": max_drafts,
        "answers": str(answers),
        "acceptance": acceptance,
    }


def check_outputs(folder: Path, answers: Path) -> None:
    """Compare outputs of a float32 model with and without draft tokens. Raises AssertionError."""
    prompts = [[(7 * row + 3 * i) % 990 for i in range(5 + 3 * row)] for row in range(4)]
    plain = User(folder, 48, None)
    expected, _ = plain.ask(prompts)
    plain.llm.shutdown()
    answers.write_text(json.dumps(expected))
    # Steps of this model are so short that the engine would not choose to draft.
    with patch(
        "tokenspeed_core.engine.drafting.AdaptiveDepth",
        lambda num_seqs, most, *, is_model: FixedDepth(most),
    ):
        drafted = User(folder, 48, drafting(answers, 0.7, MAX_DRAFTS))
    found, _ = drafted.ask(prompts)
    _, num_accepted, _ = drafted.accepted()
    drafted.llm.shutdown()
    assert found == expected, "outputs differ with and without draft tokens"
    assert num_accepted, "no draft token was accepted"
    print(json.dumps({"check": "outputs are equal", "accepted": num_accepted}), flush=True)


def serve_one(folder: Path, answers: Path, options: argparse.Namespace) -> None:
    """Print the ms per token of one user, without and with draft tokens."""
    prompt = [(31 * i) % 990 for i in range(128)]
    plain = User(folder, options.tokens, None, "last_token")
    expected, _ = plain.ask([prompt])
    plain_ms = 1e3 * min(plain.ask([prompt])[1] for _ in range(2)) / options.tokens
    plain.llm.shutdown()
    settings = drafting(answers, options.acceptance, options.user_drafts)
    user = User(folder, options.tokens, settings, "last_token")
    answers.write_text(json.dumps(expected))
    found, _ = user.ask([prompt])
    assert found == expected, "outputs of one user differ with and without draft tokens"
    before, seconds = user.accepted(), []
    for _ in range(3):
        seconds.append(user.ask([prompt])[1])
    num_drafts, num_accepted, num_steps = np.subtract(user.accepted(), before).tolist()
    user.llm.shutdown()
    row = {
        "user": "one",
        "plain_ms_per_token": round(plain_ms, 3),
        "drafted_ms_per_token": round(1e3 * statistics.median(seconds) / options.tokens, 3),
        "accepted_per_step": round(num_accepted / max(1, num_steps), 2),
        "drafts_per_step": round(num_drafts / max(1, num_steps), 2),
        "drafting_steps_per_run": round(num_steps / 3, 1),
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-8b", help=f"small, {', '.join(SHAPES)}")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 4, 16, 64], help="numbers of sequences"
    )
    parser.add_argument(
        "--drafts", type=int, nargs="+", default=[1, 3, 4, 7, 8], help="draft tokens per row"
    )
    parser.add_argument(
        "--context", type=int, default=1024, help="tokens per sequence at the start"
    )
    parser.add_argument("--steps", type=int, default=30, help="steps per measurement")
    parser.add_argument("--tokens", type=int, default=512, help="length of the user's answer")
    parser.add_argument(
        "--acceptance", type=float, default=0.7, help="probability of a right draft token"
    )
    parser.add_argument(
        "--user-drafts", type=int, default=12, help="maximum draft tokens per step of the user"
    )
    parser.add_argument(
        "--bandwidth", type=float, default=4.5e12, help="bytes per second, for the floor"
    )
    options = parser.parse_args()
    begin = time.perf_counter()
    SHAPES["small"] = {**SHAPES["qwen3-8b"], **SMALL}
    print(json.dumps(machine()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        install_forced(root)
        last_token_weights.install(root)
        sys.path.insert(0, folder)
        answers = root / "answers.json"
        check_outputs(write("small", root), answers)
        path = write(options.shape, root)
        time_steps(path, options)
        serve_one(path, answers, options)
    print(json.dumps({"seconds": round(time.perf_counter() - begin, 1)}))


if __name__ == "__main__":
    main()
