"""A model without tensors behind the real step contract, for testing what plans and what keeps blocks.

The null model's next token depends on every token of the sequence (through a recurrent state) and on where
the last ones lie in the cache (through a windowed read), so that a block reused too early, a table entry
missing or a state resumed wrongly shows as a wrong token. `expected` is the sequential oracle.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenspeed_core.api.cache_groups import CacheGroupSpec
from tokenspeed_core.api.step import I32, LateInputs, StepFailed, StepPlan, StepResult

_PRIME = 1_000_003
Allowed = Callable[[int, int], bool]  # (last token, candidate) -> whether a mask lets it pass


@dataclass(frozen=True, slots=True)
class NullModel:
    """The pure function: vocabulary and the number of last tokens that the windowed read sees.

    A model whose groups keep states alone reads none: its window is 0.
    """

    vocab_size: int = 64
    window: int = 6

    def advance(self, state: int, token: int) -> int:
        """Return the recurrent state after one more token."""
        return (state * 31 + token * 7 + 1) % _PRIME

    def next_token(
        self, state: int, window: Sequence[int], mask: Sequence[bool] | None = None
    ) -> int:
        """Return the next token: a hash of the state and the window, or the first allowed one after it."""
        token = (state + sum(t * (i + 1) for i, t in enumerate(window))) % self.vocab_size
        if mask is not None:
            while not mask[token]:
                token = (token + 1) % self.vocab_size
        return token

    def expected(
        self, prompt: Sequence[int], num_tokens: int, allowed: Allowed | None = None
    ) -> list[int]:
        """Return what a sequence must get, computed one token after another."""
        tokens, state = list(prompt), 0
        for token in tokens:
            state = self.advance(state, token)
        for _ in range(num_tokens):
            last = tokens[-1]
            mask = None if allowed is None else [allowed(last, t) for t in range(self.vocab_size)]
            tokens.append(self.next_token(state, tokens[max(0, len(tokens) - self.window) :], mask))
            state = self.advance(state, tokens[-1])
        return tokens[len(prompt) :]


class NullRunner:
    """Runs plans on the null model, with a cache of blocks as the KV manager hands them out.

    Rows verify `num_query_tokens - 1` drafts, each of which is right with probability 0.6.
    """

    def __init__(
        self,
        model: NullModel,
        groups: Sequence[CacheGroupSpec],
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        *,
        seed: int = 0,
        fail_at: frozenset[int] = frozenset(),
    ) -> None:
        """Start with a poisoned cache. Steps in `fail_at` raise StepFailed when collected."""
        self.model, self.groups, self.block_size = model, tuple(groups), block_size
        self.positions = np.full((num_blocks, block_size), -7, np.int64)
        self.tokens = np.full((num_blocks, block_size), -7, np.int64)
        self.states = np.full(num_blocks, -7, np.int64)
        self.state_lens = np.full(num_blocks, -7, np.int64)
        table_width = max_model_len // block_size + 2
        self.tables = [np.full((max_num_seqs, table_width), -1, np.int64) for _ in groups]
        self.length = np.zeros(max_num_seqs, np.int64)
        self.last = np.zeros(max_num_seqs, np.int64)
        self.group_counts: list[I32] = []
        self._random = random.Random(seed)
        self._fail_at = fail_at
        self._plan: StepPlan | None = None
        self._results: deque[StepResult] = deque()

    def forward(self, plan: StepPlan) -> None:
        """Take a plan; apply its copies and table entries."""
        for table, delta in zip(self.tables, plan.block_deltas, strict=True):
            table[delta.slots, delta.indices] = delta.blocks
        for copy in plan.block_copies:
            for blocks in (self.positions, self.tokens, self.states, self.state_lens):
                blocks[copy.dst] = blocks[copy.src]
        self.group_counts.append(plan.group_num_tokens)
        self._plan = plan

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        """Compute the step; its result waits for `collect`."""
        plan = self._plan
        assert plan is not None and plan.step_id == step_id
        masks = self._masks(late)
        chunks = self._write_chunks(plan)
        rows: list[list[int]] = []
        for row, slot in enumerate(plan.slots):
            if row < plan.num_decodes:
                rows.append(self._decode(plan, row, int(slot), masks.get(row)))
            else:
                rows.append(
                    self._finish_chunk(
                        plan, row, int(slot), chunks[row - plan.num_decodes], masks.get(row)
                    )
                )
        self._results.append(
            StepResult(
                step_id,
                np.asarray([len(r) for r in rows], np.int32),
                np.asarray([token for r in rows for token in r], np.int32),
                None,
            )
        )

    def collect(self, step_id: int) -> StepResult:
        """Return the oldest result."""
        result = self._results.popleft()
        assert result.step_id == step_id
        if step_id in self._fail_at:
            raise StepFailed("a step was made to fail")
        return result

    def close(self) -> None:
        """Do nothing: there is no device."""

    def _masks(self, late: LateInputs | None) -> dict[int, list[bool]]:
        if late is None:
            return {}
        words = late.mask.view(np.uint8).reshape(len(late.rows), -1)
        bits = np.unpackbits(words, axis=1, bitorder="little")[:, : self.model.vocab_size]
        return {int(row): [bool(b) for b in bits[i]] for i, row in enumerate(late.rows)}

    def _write_chunks(self, plan: StepPlan) -> list[list[int]]:
        """Write all prompt tokens before anything is read, as every layer does."""
        chunks, at = [], 0
        for row in range(plan.num_decodes, plan.num_rows):
            num = int(plan.num_query_tokens[row])
            tokens = [int(t) for t in plan.token_ids[at : at + num]]
            at += num
            for i, token in enumerate(tokens):
                self._write(int(plan.slots[row]), int(plan.num_computed_tokens[row]) + i, token)
            chunks.append(tokens)
        return chunks

    def _finish_chunk(
        self,
        plan: StepPlan,
        row: int,
        slot: int,
        tokens: list[int],
        mask: list[bool] | None,
    ) -> list[int]:
        start = int(plan.num_computed_tokens[row])
        for i, token in enumerate(tokens):
            self._advance(slot, start + i, token)
        if not plan.wants_logits[row]:
            return []
        end = start + len(tokens)
        following = self.model.next_token(self._state(slot, end), self._window(slot, end), mask)
        self.length[slot], self.last[slot] = end + 1, following
        return [following]

    def _decode(self, plan: StepPlan, row: int, slot: int, mask: list[bool] | None) -> list[int]:
        num_query = int(plan.num_query_tokens[row])
        position, token = int(self.length[slot]) - 1, int(self.last[slot])
        assert position <= plan.num_computed_tokens[row], "the plan's length is no upper bound"
        emitted: list[int] = []
        for i in range(num_query):
            self._write(slot, position, token)
            self._advance(slot, position, token)
            position += 1
            token = self.model.next_token(
                self._state(slot, position), self._window(slot, position), mask
            )
            emitted.append(token)
            if i + 1 < num_query and self._random.random() > 0.6:
                for rejected in range(position, position + num_query - i - 1):
                    self._write(slot, rejected, self.model.vocab_size - 1)
                break
        self.length[slot], self.last[slot] = position + 1, token
        return emitted

    def _write(self, slot: int, position: int, token: int) -> None:
        index, offset = divmod(position, self.block_size)
        for group, table in zip(self.groups, self.tables, strict=True):
            if not group.is_recurrent:
                block = table[slot, index]
                assert block >= 0, "a row writes where its table has no block"
                self.positions[block, offset], self.tokens[block, offset] = position, token

    def _advance(self, slot: int, position: int, token: int) -> None:
        for group, table in zip(self.groups, self.tables, strict=True):
            if group.is_recurrent:
                block = table[slot, 0]
                if position == 0:
                    self.states[block] = self.state_lens[block] = 0
                assert self.state_lens[block] == position, (
                    "a recurrent state does not stand where the row starts"
                )
                self.states[block] = self.model.advance(int(self.states[block]), token)
                self.state_lens[block] += 1

    def _state(self, slot: int, length: int) -> int:
        """Return the state after `length` tokens, from the group that keeps it or from a full cache."""
        for group, table in zip(self.groups, self.tables, strict=True):
            if group.is_recurrent:
                return int(self.states[table[slot, 0]])
        state = 0
        for token in self._read(slot, 0, length):
            state = self.model.advance(state, token)
        return state

    def _window(self, slot: int, length: int) -> list[int]:
        return self._read(slot, max(0, length - self.model.window), length)

    def _read(self, slot: int, start: int, end: int) -> list[int]:
        """Read tokens through every group's table that must still hold them; they must agree."""
        if start == end:
            return []
        found: list[list[int]] = []
        for group, table in zip(self.groups, self.tables, strict=True):
            if group.is_recurrent or group.first_needed(end - 1) > start:
                continue
            tokens = []
            for position in range(start, end):
                block, offset = table[slot, position // self.block_size], position % self.block_size
                assert self.positions[block, offset] == position, "a block holds another position"
                tokens.append(int(self.tokens[block, offset]))
            found.append(tokens)
        assert found, "no group holds these tokens"
        assert all(tokens == found[0] for tokens in found)
        return found[0]
