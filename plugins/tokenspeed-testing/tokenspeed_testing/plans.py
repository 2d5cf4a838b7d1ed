"""Step plans by hand: sequences, slots and blocks kept by a test, without a scheduler. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenspeed_core.api.step import BlockDelta, Runner, SlotInits, StepPlan, StepResult

_DEFAULTS: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": 0,
    "logprobs": -1,
}


@dataclass(slots=True, eq=False)
class Tracked:
    """A sequence as a test sees it: `tokens` are the prompt and the collected samples."""

    slot: int
    tokens: list[int]
    num_prompt: int
    num_computed: int
    blocks: list[list[int]]
    spare: list[list[int]]  # blocks of its last pages that are not in the tables yet
    params: Mapping[str, Any]
    bias: Mapping[int, float]
    is_new: bool = True
    num_sent: list[int] = field(default_factory=list)
    num_endless: int = 0
    end_ids: tuple[int, ...] = ()

    @property
    def output(self) -> list[int]:
        """The tokens sampled so far."""
        return self.tokens[self.num_prompt :]


class PlanMaker:
    """Makes plans for named sequences; pages are handed out in order and never reused by themselves."""

    def __init__(self, block_size: int, blocks_per_page: Sequence[int] = (1,)) -> None:
        """Start with no sequence. `blocks_per_page` has an entry for each cache group."""
        self.block_size = block_size
        self.blocks_per_page = tuple(blocks_per_page)
        self.num_groups = len(self.blocks_per_page)
        self.sequences: dict[str, Tracked] = {}
        self.next_page = 0
        self.next_step = 0

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        slot: int,
        *,
        bias: Mapping[int, float] | None = None,
        shared: tuple[str, int] | None = None,
        endless: tuple[int, Sequence[int]] = (0, ()),
        **params: Any,
    ) -> Tracked:
        """Add a sequence to a slot; `shared` (name, tokens) takes full blocks of another as its prefix.

        With `endless` (number, ids), none of the first `number` output tokens is one of the ids.
        """
        blocks: list[list[int]] = [[] for _ in range(self.num_groups)]
        num_computed = 0
        if shared is not None:
            num_computed = shared[1]
            blocks = [
                list(b[: num_computed // self.block_size]) for b in self.sequences[shared[0]].blocks
            ]
        sequence = Tracked(
            slot,
            list(prompt),
            len(prompt),
            num_computed,
            blocks,
            [[] for _ in blocks],
            {**_DEFAULTS, **params},
            dict(bias or {}),
            num_sent=[0] * self.num_groups,
            num_endless=endless[0],
            end_ids=tuple(endless[1]),
        )
        self.sequences[name] = sequence
        return sequence

    def plan(
        self, decodes: Sequence[str] = (), chunks: Mapping[str, int] | None = None
    ) -> StepPlan:
        """Plan one decode for each of `decodes` and `chunks[name]` prompt tokens for the others.

        A chunk that ends the known tokens wants logits.
        """
        chunks = chunks or {}
        rows = [self.sequences[name] for name in (*decodes, *chunks)]
        counts = [1] * len(decodes) + list(chunks.values())
        computed = [row.num_computed for row in rows]
        wants, ids = [True] * len(decodes), []
        for row, count in zip(rows[len(decodes) :], chunks.values(), strict=True):
            ids += row.tokens[row.num_computed : row.num_computed + count]
            wants.append(row.num_computed + count >= len(row.tokens))
        inits = self._inits([row for row in rows if row.is_new])
        deltas = self._grow(rows, counts)
        self.next_step += 1
        return StepPlan(
            step_id=self.next_step,
            num_decodes=len(decodes),
            slots=_int(row.slot for row in rows),
            num_query_tokens=_int(counts),
            num_computed_tokens=_int(computed),
            wants_logits=np.array(wants, bool),
            token_ids=_int(ids),
            adapter_ids=np.zeros(len(rows), np.int32),
            block_deltas=deltas,
            slot_inits=inits,
        )

    def take(self, plan: StepPlan, result: StepResult) -> None:
        """Append a result's tokens to the sequences of its plan."""
        by_slot = {sequence.slot: sequence for sequence in self.sequences.values()}
        ids = iter(result.token_ids.tolist())
        for slot, count in zip(plan.slots.tolist(), result.num_tokens.tolist(), strict=True):
            by_slot[slot].tokens += [next(ids) for _ in range(count)]

    def step(
        self, runner: Runner, decodes: Sequence[str] = (), chunks: Mapping[str, int] | None = None
    ) -> StepResult:
        """Plan, run and take one step."""
        plan = self.plan(decodes, chunks)
        runner.forward(plan)
        runner.sample(plan.step_id, None)
        result = runner.collect(plan.step_id)
        self.take(plan, result)
        return result

    def drop(self, name: str) -> None:
        """Forget a sequence; its slot is free."""
        del self.sequences[name]

    def _grow(self, rows: Sequence[Tracked], counts: Sequence[int]) -> tuple[BlockDelta, ...]:
        deltas = []
        for group, per_page in enumerate(self.blocks_per_page):
            entries = []
            for row, count in zip(rows, counts, strict=True):
                table, spare = row.blocks[group], row.spare[group]
                while len(table) * self.block_size < row.num_computed + count:
                    if not spare:
                        spare += range(self.next_page * per_page, (self.next_page + 1) * per_page)
                        self.next_page += 1
                    table.append(spare.pop(0))
                entries += [(row.slot, i, table[i]) for i in range(row.num_sent[group], len(table))]
                row.num_sent[group] = len(table)
            columns = np.array(entries, np.int32).reshape(-1, 3)
            deltas.append(BlockDelta(*(np.ascontiguousarray(columns[:, i]) for i in range(3))))
        for row, count in zip(rows, counts, strict=True):
            row.num_computed += count
            row.is_new = False
        return tuple(deltas)

    def _inits(self, rows: Sequence[Tracked]) -> SlotInits | None:
        if not rows:
            return None
        kinds = {"seed": np.int64, "top_k": np.int32, "logprobs": np.int32}
        columns: dict[str, Any] = {
            name: np.array([row.params[name] for row in rows], kinds.get(name, np.float32))
            for name in _DEFAULTS
        }
        histories = [row.tokens for row in rows]
        return SlotInits(
            slots=_int(row.slot for row in rows),
            **columns,
            bias_starts=_starts([len(row.bias) for row in rows]),
            bias_ids=_int(token for row in rows for token in row.bias),
            bias_values=np.array(
                [value for row in rows for value in row.bias.values()], np.float32
            ),
            history_starts=_starts([len(history) for history in histories]),
            history_ids=_int(token for history in histories for token in history),
            history_num_prompt=_int(row.num_prompt for row in rows),
            num_endless=_int(row.num_endless if row.end_ids else 0 for row in rows),
            end_starts=_starts([len(row.end_ids) for row in rows]),
            end_ids=_int(token for row in rows for token in row.end_ids),
        )


def _int(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(list(values), np.int32)


def _starts(lengths: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
