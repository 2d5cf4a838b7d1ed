"""Replay known answers through drafters on the host, without a model: tokens per step, and the drafter's CPU time.

The answers are those of the demo model's held-out items, and the task `rename` copies modules of Python's standard
library with a renamed variable. A step adds the accepted draft tokens and one more. A drafter sees a task's items one
after another, as one API key's requests; each task starts with a new drafter. `proposal_us` is the time of one call of
`propose`, and `step_us` all of the drafter's time, divided by the steps.

`arctic` is the suffix cache of the package arctic-inference, if it is installed, with the defaults with which vLLM calls
it. The benchmark compares drafters, not engines. Example:

    OMP_NUM_THREADS=1 python benchmarks/drafters.py --drafters ngram,suffix
    OMP_NUM_THREADS=1 python benchmarks/drafters.py --drafters suffix,arctic --tasks edit,rename --drafts 16
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from itertools import islice
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenspeed_bench.result import machine
from tokenspeed_demo.items import REQUIRED, Item, held_out_set
from tokenspeed_demo.render import TEMPLATE, Renderer

from tokenspeed_core.api.drafters import Drafter, DrafterContext, Drafts
from tokenspeed_core.api.step import I32

RENAME = "rename"
PEER = "arctic"
MIN_CHARS, MAX_CHARS = 2_000, 20_000  # of a module
MIN_USES = 5  # of a variable
NEW_NAMES = ("replacement", "current_item", "record")


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and its answer, with the token that ends it, as token ids."""

    prompt: list[int]
    answer: list[int]


class Peer:
    """The suffix cache of arctic-inference as a drafter."""

    def __init__(self, context: DrafterContext) -> None:
        """Start without sequences."""
        module = import_module("arctic_inference.suffix_decoding.cache")
        self._max_depth = 24
        self._cache = module.SuffixDecodingCache(self._max_depth, max_cached_requests=10_000)
        self._request_id = 0
        self._tokens: list[int] = []

    def begin(self, slot: int, token_ids: I32, num_prompt_tokens: int, tenant: str) -> None:
        """Start a sequence. Only one runs at a time."""
        self._request_id += 1
        self._tokens = token_ids.tolist()
        self._cache.start_request(self._request_id, token_ids[:num_prompt_tokens])
        self._cache.add_active_response(self._request_id, self._tokens[num_prompt_tokens:])

    def extend(self, slots: I32, counts: I32, token_ids: I32) -> None:
        """Add generated tokens."""
        new_tokens = token_ids.tolist()
        self._tokens += new_tokens
        self._cache.add_active_response(self._request_id, new_tokens)

    def propose(self, slots: I32, max_drafts: I32) -> Drafts:
        """Return the most probable continuation."""
        found = self._cache.speculate(
            self._request_id,
            np.asarray(self._tokens[-self._max_depth :], np.int32),
            max_spec_tokens=int(max_drafts[0]),
            max_spec_factor=1.0,
            min_token_prob=0.1,
        ).token_ids
        return Drafts(np.asarray([len(found)], np.int32), np.asarray(found, np.int32))

    def end(self, slot: int) -> None:
        """Keep the answer for later sequences."""
        self._cache.stop_request(self._request_id)


def renames(num_items: int) -> Iterator[Item]:
    """Yield modules of the standard library whose most frequent variable gets another name."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if MIN_CHARS <= len(source) <= MAX_CHARS:
            yield from islice(renamed(source), num_items)


def renamed(source: str) -> Iterator[Item]:
    """Yield the item of a module, if it has a variable that is used often."""
    nodes = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Name)]
    stored = {each.id for each in nodes if isinstance(each.ctx, ast.Store)}
    uses = Counter(each.id for each in nodes if each.id in stored)
    if not uses or uses.most_common(1)[0][1] < MIN_USES:
        return
    old = uses.most_common(1)[0][0]
    new = next(each for each in NEW_NAMES if each not in source)
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for node in sorted(nodes, key=lambda each: (each.lineno, each.col_offset), reverse=True):
        if node.id == old:
            line, start = lines[node.lineno - 1], node.col_offset
            end = start + len(old.encode())
            lines[node.lineno - 1] = line[:start] + new.encode() + line[end:]
    request = f"Rename {old} to {new} and return the whole file.\n\n{source}"
    yield Item(RENAME, ({"role": "user", "content": request},), b"".join(lines).decode())


def answers_of(task: str, num_items: int) -> list[Answer]:
    """Return the prompts and answers of a task."""
    tokenizer = Tokenizer.from_file(str(TEMPLATE.parent / "tokenizer.json"))
    renderer = Renderer()
    items = (
        [*islice(renames(num_items), num_items)]
        if task == RENAME
        else held_out_set(task, num_items)
    )

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return [
        Answer(encode(renderer.prompt(each)), encode(renderer.completion(each))) for each in items
    ]


def factory(name: str) -> Callable[[DrafterContext], Drafter]:
    """Return the factory of a drafter on the host by the name of its algorithm."""
    if name == PEER:
        return Peer
    (entry,) = entry_points(group="tokenspeed.drafters", name=name)
    make: Callable[[DrafterContext], Drafter] = entry.load().make
    return make


class Replay:
    """Runs answers through a drafter, and counts its steps, tokens and time."""

    def __init__(self, drafter: Drafter, max_drafts: int) -> None:
        """Start with counts of 0."""
        self._drafter = drafter
        self._max_drafts = max_drafts
        self.num_steps = self.num_tokens = self.num_drafts = self.num_accepted = 0
        self.seconds = self.proposal_seconds = 0.0

    def run(self, known: Answer) -> None:
        """Replay an answer. The prompt's step gives its first token without drafts."""
        drafter, answer = self._drafter, known.answer
        slots = np.zeros(1, np.int32)
        started_at = thread_time()
        first = np.asarray([*known.prompt, answer[0]], np.int32)
        drafter.begin(0, first, len(known.prompt), "")
        self.seconds += thread_time() - started_at
        position = 1
        while position < len(answer):
            limits = np.asarray([min(self._max_drafts, len(answer) - position)], np.int32)
            started_at = thread_time()
            drafts = drafter.propose(slots, limits)
            proposed_at = thread_time()
            proposed = drafts.token_ids.tolist()
            num_right = 0
            while num_right < len(proposed) and proposed[num_right] == answer[position + num_right]:
                num_right += 1
            new = np.asarray(answer[position : position + num_right + 1], np.int32)
            counts = np.asarray([len(new)], np.int32)
            extends_at = thread_time()
            drafter.extend(slots, counts, new)
            self.proposal_seconds += proposed_at - started_at
            self.seconds += proposed_at - started_at + thread_time() - extends_at
            position += len(new)
            self.num_steps += 1
            self.num_tokens += len(new)
            self.num_drafts += len(proposed)
            self.num_accepted += num_right
        started_at = thread_time()
        drafter.end(0)
        self.seconds += thread_time() - started_at


def measure(name: str, task: str, answers: list[Answer], max_drafts: int) -> dict[str, Any]:
    """Return the figures of a drafter with a task."""
    max_len = max(len(each.prompt) + len(each.answer) for each in answers)
    context = DrafterContext(1 << 20, 1, max_len, max_drafts, {})
    replay = Replay(factory(name)(context), max_drafts)
    for each in answers:
        replay.run(each)
    return {
        "task": task,
        "drafter": name,
        "items": len(answers),
        "tokens_per_step": round(replay.num_tokens / replay.num_steps, 2),
        "drafts_per_step": round(replay.num_drafts / replay.num_steps, 2),
        "accepted": round(replay.num_accepted / max(1, replay.num_drafts), 2),
        "proposal_us": round(1e6 * replay.proposal_seconds / replay.num_steps, 1),
        "step_us": round(1e6 * replay.seconds / replay.num_steps, 1),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect the result."""
    found = {"python": platform.python_version(), "numpy": np.__version__}
    with suppress(PackageNotFoundError):
        found["arctic-inference"] = version("arctic-inference")
    return found


def main() -> None:
    """Measure, and print a JSON line for each task and drafter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--drafters", default="ngram,suffix", help=f"names of drafters on the host, or {PEER}"
    )
    parser.add_argument("--tasks", default=",".join([*REQUIRED, RENAME]), help="tasks to replay")
    parser.add_argument("--items", type=int, default=300, help="items of a task")
    parser.add_argument("--drafts", type=int, default=8, help="maximum draft tokens of a step")
    arguments = parser.parse_args()
    print(json.dumps({"machine": machine(), **versions()}))
    for task in arguments.tasks.split(","):
        answers = answers_of(task, arguments.items)
        for name in arguments.drafters.split(","):
            print(json.dumps(measure(name, task, answers, arguments.drafts)), flush=True)


if __name__ == "__main__":
    main()
