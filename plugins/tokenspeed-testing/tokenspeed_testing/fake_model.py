"""A model without tensors that implements the step contract, to test schedulers and KV managers.

The next token depends on all tokens of the sequence and on the last few of them, each read from the cache through the
block tables. So a block that is reused too early, or a missing table entry, gives a wrong token.
`FakeModel.expected` computes the right ones sequentially.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from tokenspeed_core.api.cache_groups import CacheGroupSpec
from tokenspeed_core.api.step import (
    I32,
    LateInputs,
    PromptLogprobs,
    StepFailed,
    StepPlan,
    StepResult,
)

_PRIME = 1_000_003
_UNWRITTEN = -7
Allowed = Callable[[int, int], bool]  # (last token, candidate) -> whether the mask allows it


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A pure function from tokens to the next one. Without `reads_all` it reads the last `window` tokens only."""

    vocab_size: int = 64
    window: int = 6
    reads_all: bool = True

    def next_token(
        self, everything: Sequence[int], window: Sequence[int], mask: Sequence[bool] | None = None
    ) -> int:
        """Return a hash of the tokens read, or the first token after it that the mask allows."""
        total = 0
        for token in everything:
            total = (total * 31 + token * 7 + 1) % _PRIME
        total += sum(token * (i + 1) for i, token in enumerate(window))
        following = total % self.vocab_size
        if mask is not None:
            while not mask[following]:
                following = (following + 1) % self.vocab_size
        return following

    def expected(
        self, prompt: Sequence[int], num_tokens: int, allowed: Allowed | None = None
    ) -> list[int]:
        """Return the output of a sequence, computed one token after another."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            last = tokens[-1]
            mask = None if allowed is None else [allowed(last, t) for t in range(self.vocab_size)]
            window = tokens[max(0, len(tokens) - self.window) :]
            tokens.append(self.next_token(tokens if self.reads_all else [], window, mask))
        return tokens[len(prompt) :]

    def expected_prompt_logprobs(self, prompt: Sequence[int]) -> list[tuple[int, int]]:
        """Return the value and the rank that `FakeRunner` gives each prompt token after the first."""
        return [
            (self.expected(prompt[:length], 1)[0], prompt[length])
            for length in range(1, len(prompt))
        ]


class FakeRunner:
    """Runs plans on the fake model, with a cache of blocks as the KV manager hands them out.

    It verifies the draft tokens of a plan. It also makes those of a draft model: about every third token is wrong.
    """

    def __init__(
        self,
        model: FakeModel,
        groups: Sequence[CacheGroupSpec],
        num_pages: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        *,
        blocks_per_page: Sequence[int] | None = None,
        fail_at: frozenset[int] = frozenset(),
    ) -> None:
        """Start with an unwritten cache. `collect` raises StepFailed for the steps in `fail_at`.

        A page consists of as many units as any group's number of blocks in it (1 by default) divides.
        """
        self.model = model
        self.groups = tuple(groups)
        self.block_size = block_size
        blocks_per_page = blocks_per_page or (1,) * len(self.groups)
        num_units = lcm(*blocks_per_page)
        self._units_per_block = [num_units // each for each in blocks_per_page]
        self.positions = np.full((num_pages * num_units, block_size), _UNWRITTEN, np.int64)
        self.tokens = np.full((num_pages * num_units, block_size), _UNWRITTEN, np.int64)
        table_width = max_model_len // block_size + 2
        self.tables = [np.full((max_num_seqs, table_width), -1, np.int64) for _ in groups]
        self.length = np.zeros(max_num_seqs, np.int64)
        self.last = np.zeros(max_num_seqs, np.int64)
        self._fail_at = fail_at
        self._plan: StepPlan | None = None
        self._results: deque[StepResult] = deque()
        self._drafts: dict[int, list[int]] = {}  # that the draft model made for a slot
        self._num_drafts_in_flight: deque[int] = deque()

    def forward(self, plan: StepPlan) -> None:
        """Take a plan and apply its changes to the block tables."""
        assert not any(self._num_drafts_in_flight), "the step needs exact lengths"
        self._num_drafts_in_flight.append(plan.num_draft_tokens)
        for table, delta in zip(self.tables, plan.block_deltas, strict=True):
            table[delta.slots, delta.indices] = delta.blocks
        self._plan = plan

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        """Compute the step for `collect`."""
        plan = self._plan
        assert plan is not None and plan.step_id == step_id
        masks = self._masks(late)
        self._write_chunks(plan)
        rows: list[list[int]] = []
        given = None if plan.draft_token_ids is None else iter(plan.draft_token_ids.tolist())
        for row, slot in enumerate(plan.slots):
            allowed = masks.get(row, [])
            if row < plan.num_decodes:
                num_drafts = int(plan.num_query_tokens[row]) - 1
                made = iter(self._drafts.get(int(slot), ())) if given is None else given
                draft = [next(made) for _ in range(num_drafts)]
                rows.append(self._decode(plan, row, int(slot), draft, allowed))
            else:
                mask = allowed[0] if allowed else None
                rows.append(self._finish_chunk(plan, row, int(slot), mask))
        self._results.append(
            StepResult(
                step_id,
                np.asarray([len(r) for r in rows], np.int32),
                np.asarray([token for r in rows for token in r], np.int32),
                None,
                self._prompt_logprobs(plan),
                self._make_drafts(plan),
            )
        )

    def collect(self, step_id: int) -> StepResult:
        """Return the oldest result."""
        result = self._results.popleft()
        self._num_drafts_in_flight.popleft()
        assert result.step_id == step_id
        if step_id in self._fail_at:
            raise StepFailed(f"step {step_id} was made to fail")
        return result

    def close(self) -> None:
        """Do nothing."""

    def _masks(self, late: LateInputs | None) -> dict[int, list[list[bool]]]:
        """Return the masks of each row, one for each of its query tokens."""
        masks: dict[int, list[list[bool]]] = {}
        if late is None:
            return masks
        words = late.mask.view(np.uint8).reshape(len(late.rows), -1)
        bits = np.unpackbits(words, axis=1, bitorder="little")[:, : self.model.vocab_size]
        for row, mask in zip(late.rows.tolist(), bits, strict=True):
            masks.setdefault(row, []).append([bool(bit) for bit in mask])
        return masks

    def _write_chunks(self, plan: StepPlan) -> None:
        """Write all prompt tokens before anything is read, as every layer does."""
        at = 0
        for row in range(plan.num_decodes, plan.num_rows):
            start, num = int(plan.num_computed_tokens[row]), int(plan.num_query_tokens[row])
            for i, token in enumerate(plan.token_ids[at : at + num]):
                self._write(int(plan.slots[row]), start + i, int(token))
            at += num

    def _finish_chunk(
        self, plan: StepPlan, row: int, slot: int, mask: list[bool] | None
    ) -> list[int]:
        if not plan.wants_logits[row]:
            return []
        end = int(plan.num_computed_tokens[row] + plan.num_query_tokens[row])
        following = self._next(slot, end, mask)
        self.length[slot], self.last[slot] = end + 1, following
        return [following]

    def _prompt_logprobs(self, plan: StepPlan) -> PromptLogprobs | None:
        """Return, as values, the token that would be sampled before each target; ranks are the targets."""
        targets = plan.prompt_targets
        if targets is None:
            return None
        values = [
            self._next(int(plan.slots[row]), int(plan.num_computed_tokens[row]) + at + 1, None)
            for row, start, count in zip(targets.rows, targets.starts, targets.counts, strict=True)
            for at in range(int(start), int(start + count))
        ]
        chosen = np.asarray(values, np.float32)
        alternatives = np.repeat(chosen, targets.width)
        return PromptLogprobs(
            targets.width, chosen, targets.token_ids, alternatives.astype(np.int32), alternatives
        )

    def _make_drafts(self, plan: StepPlan) -> I32 | None:
        """Make draft tokens for the rows that sample, if a draft model runs. Returns them if the host needs them."""
        wanted = plan.next_drafts
        if wanted is None:
            return None
        found: list[int] = []
        for slot in plan.slots[plan.wants_logits].tolist():
            length, window = int(self.length[slot]), self.model.window
            start = 0 if self.model.reads_all else max(0, length - 1 - window)
            tokens = [*self._read(slot, start, length - 1), int(self.last[slot])]
            for i in range(wanted.num_drafts):
                right = self.model.next_token(
                    tokens if self.model.reads_all else [], tokens[-window:]
                )
                is_wrong = (plan.step_id + slot + i) % 3 == 0
                tokens.append((right + is_wrong) % self.model.vocab_size)
            self._drafts[slot] = tokens[len(tokens) - wanted.num_drafts :]
            found += self._drafts[slot]
        return np.asarray(found, np.int32) if wanted.returns_ids else None

    def _decode(
        self, plan: StepPlan, row: int, slot: int, draft: list[int], masks: list[list[bool]]
    ) -> list[int]:
        """Write all query tokens, then keep draft tokens while they are those that the model chooses."""
        position, token = int(self.length[slot]) - 1, int(self.last[slot])
        assert position <= plan.num_computed_tokens[row], "the plan's length is not an upper bound"
        assert len(masks) in (0, 1 + len(draft)), "the masks do not match the query tokens"
        for i, query in enumerate((token, *draft)):
            self._write(slot, position + i, query)
        sampled: list[int] = []
        for i in range(1 + len(draft)):
            position += 1
            sampled.append(self._next(slot, position, masks[i] if masks else None))
            if i < len(draft) and sampled[-1] != draft[i]:
                break
        self.length[slot], self.last[slot] = position + 1, sampled[-1]
        return sampled

    def _next(self, slot: int, length: int, mask: list[bool] | None) -> int:
        everything = self._read(slot, 0, length) if self.model.reads_all else []
        window = self._read(slot, max(0, length - self.model.window), length)
        return self.model.next_token(everything, window, mask)

    def _write(self, slot: int, position: int, token: int) -> None:
        index, offset = divmod(position, self.block_size)
        for group, table in enumerate(self.tables):
            block = table[slot, index]
            assert block >= 0, "a row writes where its table has no block"
            size = self._units_per_block[group]
            for unit in range(block * size, (block + 1) * size):
                self.positions[unit, offset] = position
                self.tokens[unit, offset] = token

    def _read(self, slot: int, start: int, end: int) -> list[int]:
        """Read tokens through the table of every group that must still hold them; all must agree."""
        found: list[list[int]] = []
        for group, table in enumerate(self.tables):
            if self.groups[group].first_needed(end - 1) > start:
                continue
            size, tokens = self._units_per_block[group], []
            for position in range(start, end):
                index, offset = divmod(position, self.block_size)
                first = table[slot, index] * size
                for unit in range(first, first + size):
                    assert self.positions[unit, offset] == position, (
                        "a block holds another position"
                    )
                tokens.append(int(self.tokens[first, offset]))
            found.append(tokens)
        assert found, "no group holds these tokens"
        assert all(tokens == found[0] for tokens in found)
        return found[0]
