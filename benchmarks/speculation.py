"""Measure the decoding speed of the demo model with and without drafters, on tasks of its score set.

For each number of users and each task, the engines without and with each drafter answer a few items in turn, in random
order. No drafter has seen the answers before. `speedup` is the ratio of wall-clock times, `interval` its 95 %
bootstrap interval over the turns, and `cpu_speedup` the ratio of the process's CPU times, which depend less on other
load. The drafter `none` in `--drafters` is a control. `equal` is the share of answers that equal those without drafts:
1 on a CPU in float32; elsewhere rounding may change a choice between almost equal logits. `accepted` is the share of
draft tokens that the model accepted. The task `all` sums up the others. Example:

    OMP_NUM_THREADS=1 python benchmarks/speculation.py --drafters none,ngram,suffix --users 1,8 --items 72
    python benchmarks/speculation.py --model demo-deepseek --drafters none,mtp --num-draft-tokens 4
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenspeed_bench.result import machine
from tokenspeed_demo.items import held_out_set
from tokenspeed_demo.render import TEMPLATE, Renderer

from tokenspeed_core import LLM, SamplingParams

TASKS = "edit,copy,tool_call,sum_three_digits"
MIN_EQUAL = 0.95  # share of equal answers, below which something other than rounding differs
DRAFT_MODELS = {"eagle3": "demo-eagle3"}
TURN = 8  # items of a turn, or one for each user if there are more
NUM_SAMPLES = 1000  # of the bootstrap


def speedup(plain: Sequence[float], own: Sequence[float]) -> tuple[float, list[float]]:
    """Return the ratio of the sums of seconds, and its 95 % bootstrap interval. Both engines ran the same turns."""
    seconds = np.array([plain, own])
    turns = np.random.default_rng(0).integers(len(plain), size=(NUM_SAMPLES, len(plain)))
    of_plain, of_own = seconds[:, turns].sum(axis=2)
    interval = np.quantile(of_plain / of_own, (0.025, 0.975))
    return round(sum(plain) / sum(own), 3), interval.round(3).tolist()


def prompts_of(task: str, num_items: int) -> list[dict[str, Any]]:
    """Return the prompts of the first items of a task as token ids."""
    tokenizer = Tokenizer.from_file(str(TEMPLATE.parent / "tokenizer.json"))
    renderer = Renderer()
    return [
        {"prompt_token_ids": tokenizer.encode(renderer.prompt(item), add_special_tokens=False).ids}
        for item in held_out_set(task, num_items)
    ]


@dataclass(slots=True)
class Counts:
    """Measurements of an engine on a task: the seconds of each turn, and the numbers of tokens and answers."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_answers: int = 0
    num_equal: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    def add(self, other: Counts) -> None:
        """Add the turns of another task."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def row(self, plain: Counts) -> dict[str, Any]:
        """Return the figures to print, relative to an engine without drafts that ran the same turns."""
        ratio, interval = speedup(plain.seconds, self.seconds)
        return {
            "tokens_per_s": round(self.num_tokens / sum(self.seconds), 1),
            "speedup": ratio,
            "interval": interval,
            "cpu_speedup": round(sum(plain.cpu_seconds) / sum(self.cpu_seconds), 3),
            "equal": round(self.num_equal / self.num_answers, 2),
            "accepted": round(self.num_accepted / self.num_drafts, 2) if self.num_drafts else None,
        }


class Engine:
    """A demo model with a drafter ("none": without)."""

    def __init__(
        self, model: str, drafter: str, num_draft_tokens: int, num_users: int, dtype: Any
    ) -> None:
        """Start the model."""
        settings: dict[str, Any] = {"model": model}
        if drafter != "none":
            settings |= {
                "speculative_algorithm": drafter,
                "speculative_num_draft_tokens": num_draft_tokens,
                "speculative_draft_model_path": DRAFT_MODELS.get(drafter),
            }
        self.drafter = drafter
        self.llm = LLM(dtype=dtype, max_num_seqs=num_users, max_total_tokens=65536, **settings)

    def run(self, prompts: list[dict[str, Any]], counts: Counts) -> list[list[int]]:
        """Answer all prompts with an empty prefix cache, and count the time and the tokens."""
        self.llm.reset_prefix_cache()
        drafts_before, accepted_before = self._drafts()
        started, cpu_started = time.perf_counter(), time.process_time()
        outputs = self.llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=256), use_tqdm=False
        )
        counts.seconds.append(time.perf_counter() - started)
        counts.cpu_seconds.append(time.process_time() - cpu_started)
        drafts, accepted = self._drafts()
        counts.num_drafts += drafts - drafts_before
        counts.num_accepted += accepted - accepted_before
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        counts.num_answers += len(answers)
        counts.num_tokens += sum(map(len, answers))
        return answers

    def _drafts(self) -> tuple[int, int]:
        """Return the verified and the accepted draft tokens since the start."""
        stats = self.llm.stats()
        return stats.num_draft_tokens, sum(stats.num_accepted)


def measure(
    engines: Sequence[Engine], prompts: list[dict[str, Any]], num_users: int
) -> list[Counts]:
    """Let all engines answer the prompts of a task in turns. Returns the counts of each."""
    counts = [Counts() for _ in engines]
    size = max(TURN, num_users)
    order = list(range(len(engines)))
    random = Random(0)
    for start in range(0, len(prompts), size):
        random.shuffle(order)
        answers = {
            place: engines[place].run(prompts[start : start + size], counts[place])
            for place in order
        }
        for place in order:
            counts[place].num_equal += sum(map(list.__eq__, answers[place], answers[0]))
    return counts


def show(task: str, num_users: int, engines: Sequence[Engine], counts: Sequence[Counts]) -> None:
    """Print a line for each engine."""
    for engine, own in zip(engines, counts, strict=True):
        row = own.row(counts[0])
        labels = {"task": task, "users": num_users, "drafter": engine.drafter}
        print(json.dumps(labels | row), flush=True)
        assert row["equal"] >= MIN_EQUAL, "draft tokens change the answers"


def main() -> None:
    """Measure, and print a JSON line for each task, drafter and number of users."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="demo model: demo or demo-deepseek")
    parser.add_argument("--drafters", default="ngram,suffix", help="drafters to compare")
    parser.add_argument("--tasks", default=TASKS, help="tasks to run")
    parser.add_argument("--users", default="1,8", help="numbers of concurrent users")
    parser.add_argument("--items", type=int, default=72, help="items of each task, at most 1,000")
    parser.add_argument("--num-draft-tokens", type=int, default=9, help="as for serve")
    parser.add_argument("--dtype", default="float32", help="as for serve")
    arguments = parser.parse_args()
    print(json.dumps(machine()))
    for num_users in map(int, arguments.users.split(",")):
        engines = [
            Engine(arguments.model, drafter, arguments.num_draft_tokens, num_users, arguments.dtype)
            for drafter in ("none", *arguments.drafters.split(","))
        ]
        totals = [Counts() for _ in engines]
        for task in arguments.tasks.split(","):
            counts = measure(engines, prompts_of(task, arguments.items), num_users)
            show(task, num_users, engines, counts)
            for total, own in zip(totals, counts, strict=True):
                total.add(own)
        show("all", num_users, engines, totals)
        for engine in engines:
            engine.llm.shutdown()


if __name__ == "__main__":
    main()
