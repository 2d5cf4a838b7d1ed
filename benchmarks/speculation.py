"""Measure the decoding speed of the demo model with and without drafters, on tasks of its score set.

For each number of users and each task, the engines without and with each drafter answer a few items in turn. Their order
rotates. Each of the `--repeats` has new items, so that no drafter has seen the answers. `speedup` is the ratio of
wall-clock times, `interval` its 95 % bootstrap interval over the turns, and `cpu_speedup` the ratio of the process's CPU
times, which depend less on other load. The drafter `none` in `--drafters` is a control. `equal` is the share of answers
that equal those without drafts: 1 on a CPU in float32; elsewhere rounding may change a choice between almost equal
logits. `accepted` is the share of draft tokens that the model accepted. Example:

    OMP_NUM_THREADS=1 python benchmarks/speculation.py --drafters none,ngram,suffix --users 1,8 --items 24
    python benchmarks/speculation.py --model demo-deepseek --drafters none,mtp --num-draft-tokens 4
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
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


def prompts_of(task: str, num_items: int, repeat: int) -> list[dict[str, Any]]:
    """Return the prompts of some items of a task as token ids."""
    tokenizer = Tokenizer.from_file(str(TEMPLATE.parent / "tokenizer.json"))
    renderer = Renderer()
    return [
        {"prompt_token_ids": tokenizer.encode(renderer.prompt(item), add_special_tokens=False).ids}
        for item in held_out_set(task, num_items * (repeat + 1))[num_items * repeat :]
    ]


class Engine:
    """A demo model with a drafter ("none": without), and the seconds of its runs."""

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
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.num_tokens = self.num_equal = 0

    def clear(self) -> None:
        """Discard the measurements."""
        self.seconds.clear()
        self.cpu_seconds.clear()
        self.num_tokens = self.num_equal = 0

    def run(self, prompts: list[dict[str, Any]]) -> list[list[int]]:
        """Answer all prompts with an empty prefix cache, and note the seconds."""
        self.llm.reset_prefix_cache()
        started, cpu_started = time.perf_counter(), time.process_time()
        outputs = self.llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=256), use_tqdm=False
        )
        self.seconds.append(time.perf_counter() - started)
        self.cpu_seconds.append(time.process_time() - cpu_started)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def note(self, answers: list[list[int]], expected: list[list[int]]) -> None:
        """Count the tokens of answers, and those that equal the expected ones."""
        self.num_tokens += sum(map(len, answers))
        self.num_equal += sum(map(list.__eq__, answers, expected))

    def drafts(self) -> tuple[int, tuple[int, ...]]:
        """Return the draft tokens since the start, and how many were accepted at each position."""
        stats = self.llm.stats()
        return stats.num_draft_tokens, stats.num_accepted


def main() -> None:
    """Measure, and print a JSON line for each task, drafter and number of users."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="demo model: demo or demo-deepseek")
    parser.add_argument("--drafters", default="ngram,suffix", help="drafters to compare")
    parser.add_argument("--tasks", default=TASKS, help="tasks to run")
    parser.add_argument("--users", default="1,8", help="numbers of concurrent users")
    parser.add_argument("--items", type=int, default=24, help="items of a task per repeat")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each task")
    parser.add_argument("--num-draft-tokens", type=int, default=9, help="as for serve")
    parser.add_argument("--dtype", default="float32", help="as for serve")
    arguments = parser.parse_args()
    print(json.dumps(machine()))
    for num_users in map(int, arguments.users.split(",")):
        engines = [
            Engine(arguments.model, drafter, arguments.num_draft_tokens, num_users, arguments.dtype)
            for drafter in ("none", *arguments.drafters.split(","))
        ]
        for task in arguments.tasks.split(","):
            before = [engine.drafts() for engine in engines]
            for engine in engines:
                engine.clear()
            prompts = [
                prompt
                for repeat in range(arguments.repeats)
                for prompt in prompts_of(task, arguments.items, repeat)
            ]
            size = max(TURN, num_users)
            for turn, start in enumerate(range(0, len(prompts), size)):
                first = turn % len(engines)
                order = engines[first:] + engines[:first]
                answers = {
                    id(engine): engine.run(prompts[start : start + size]) for engine in order
                }
                expected = answers[id(engines[0])]
                for engine in engines:
                    engine.note(answers[id(engine)], expected)
            num_answers = arguments.items * arguments.repeats
            plain = engines[0]
            for engine, (num_before, accepted_before) in zip(engines, before, strict=True):
                ratio, interval = speedup(plain.seconds, engine.seconds)
                num_drafts, accepted = engine.drafts()
                num_proposed = num_drafts - num_before
                num_accepted = sum(accepted) - sum(accepted_before)
                row = {
                    "task": task,
                    "users": num_users,
                    "drafter": engine.drafter,
                    "tokens_per_s": round(engine.num_tokens / sum(engine.seconds), 1),
                    "speedup": ratio,
                    "interval": interval,
                    "cpu_speedup": round(sum(plain.cpu_seconds) / sum(engine.cpu_seconds), 3),
                    "equal": round(engine.num_equal / num_answers, 2),
                    "accepted": round(num_accepted / num_proposed, 2) if num_proposed else None,
                }
                print(json.dumps(row), flush=True)
                assert row["equal"] >= MIN_EQUAL, "draft tokens change the answers"
        for engine in engines:
            engine.llm.shutdown()


if __name__ == "__main__":
    main()
