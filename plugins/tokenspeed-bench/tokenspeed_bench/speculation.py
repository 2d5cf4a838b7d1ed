"""The draft tokens of a run: how many the model accepted, by the counters of the engine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

WAIT = 2.0  # seconds; engines renew their counters every second
POLL = 0.1
BAR = 40  # characters of the longest bar

# Of TokenSpeed ("tokenspeed:...") and vLLM ("vllm:...").
_SAMPLE = re.compile(
    r"^\w+:(?P<name>spec_decode_\w+?|generation_tokens)(_total)?(?P<labels>\{.*\})? (?P<value>\S+)$",
    re.MULTILINE,
)
_ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"
_DRAFTED = "spec_decode_num_draft_tokens_per_pos"
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Sums since an engine's start.

    `num_steps` counts decodes of a sequence with draft tokens, `num_drafts` these tokens, and `num_accepted` how often
    the first of them was accepted, the second, and so on. `num_outputs` counts generated tokens. `num_drafted` counts the
    steps with a first draft token, a second, and so on; it is empty for servers that do not report it. `is_paused` says
    whether drafting is paused now.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: tuple[int, ...] = ()
    num_outputs: int = 0
    num_drafted: tuple[int, ...] = ()
    is_paused: bool = False

    def since(self, before: DraftCounts) -> DraftCounts:
        """Return the counts after an earlier moment."""
        return DraftCounts(
            self.num_steps - before.num_steps,
            self.num_drafts - before.num_drafts,
            _since(self.num_accepted, before.num_accepted),
            self.num_outputs - before.num_outputs,
            _since(self.num_drafted, before.num_drafted),
            self.is_paused,
        )

    def figures(self) -> dict[str, Any]:
        """Return the figures of a run.

        `accepted_per_step` counts the steps with 0, 1, … accepted drafts. `drafted_at_position` counts the steps with a
        first, second, … draft. `accepted_at_position` is the share of these drafts that were accepted. If their number
        is unknown, it is the share of all steps that accepted such a draft.
        """
        num_accepted = sum(self.num_accepted)
        at_least = (self.num_steps, *self.num_accepted, 0)
        per_step = [more - fewer for more, fewer in pairwise(at_least)]
        while len(per_step) > 1 and not per_step[-1]:
            per_step.pop()
        return {
            "steps": self.num_steps,
            "draft_tokens": self.num_drafts,
            "accepted_tokens": num_accepted,
            "acceptance": round(num_accepted / max(1, self.num_drafts), 4),
            "tokens_per_step": round(1 + num_accepted / max(1, self.num_steps), 4),
            "accepted_per_step": per_step,
            "drafted_at_position": list(self.num_drafted),
            "accepted_at_position": [
                round(accepted / max(1, drafted), 4)
                for accepted, drafted in zip_longest(
                    self.num_accepted,
                    self.num_drafted[: len(self.num_accepted)],
                    fillvalue=self.num_steps,
                )
            ],
        }


def _since(after: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(late - early for late, early in zip_longest(after, before, fillvalue=0))


def read_counts(page: str) -> DraftCounts | None:
    """Return the sums over all engines of a page in Prometheus's format, None if it has no such counters."""
    sums: dict[str, int] = {}
    at_position: dict[str, dict[int, int]] = {_ACCEPTED: {}, _DRAFTED: {}}
    for sample in _SAMPLE.finditer(page):
        name, value = sample["name"], int(float(sample["value"]))
        position = _POSITION.search(sample["labels"] or "")
        if position is None:
            sums[name] = sums.get(name, 0) + value
        elif name in at_position:
            counts, place = at_position[name], int(position[1])
            counts[place] = counts.get(place, 0) + value
    if "spec_decode_num_drafts" not in sums:
        return None
    return DraftCounts(
        sums["spec_decode_num_drafts"],
        sums.get("spec_decode_num_draft_tokens", 0),
        _as_tuple(at_position[_ACCEPTED]),
        sums.get("generation_tokens", 0),
        _as_tuple(at_position[_DRAFTED]),
        is_paused=sums.get("spec_decode_paused", 0) > 0,
    )


def _as_tuple(counts: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(counts.get(place, 0) for place in range(1 + max(counts, default=-1)))


def counted(
    read: Callable[[], DraftCounts | None], before: DraftCounts | None, num_outputs: int
) -> dict[str, Any]:
    """Return the entry of a run for a result, empty without a drafter.

    Waits until the server has counted the run's `num_outputs` tokens, which it does with some delay.
    """
    if before is None:
        return {}
    end = time.monotonic() + WAIT
    after = read()
    while after is not None and after.since(before).num_outputs < num_outputs:
        if time.monotonic() > end:
            break
        time.sleep(POLL)
        after = read()
    return {} if after is None else entry(after.since(before))


def entry(counts: DraftCounts) -> dict[str, Any]:
    """Return the entry of a run for a result, empty without a drafter."""
    return {"speculation": counts.figures()} if counts.num_steps or counts.is_paused else {}


def histogram(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield a run's draft tokens as text: a summary, and a bar for each number of accepted drafts."""
    if not figures["steps"]:
        yield "  draft tokens: none, because drafting was paused"
        return
    yield (
        f"  draft tokens: {100 * figures['acceptance']:.1f} % of {figures['draft_tokens']:,} accepted, "
        f"{figures['tokens_per_step']:.2f} tokens per step with drafts ({figures['steps']:,} steps)"
    )
    per_step, shares = figures["accepted_per_step"], figures["accepted_at_position"]
    most = max(per_step)
    for accepted, num in enumerate(per_step):
        bar = "#" * round(BAR * num / max(1, most))
        place = (
            f"position {accepted} accepted in {100 * shares[accepted - 1]:.1f} %"
            if accepted
            else ""
        )
        text = f"    {accepted:2} accepted {100 * num / max(1, figures['steps']):5.1f} % {bar:<{BAR}}  {place}"
        yield text.rstrip()
