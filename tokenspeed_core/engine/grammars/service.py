"""The engine's view of structured output: requests wait for their grammar, and steps get masks."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from tokenspeed_core.api.grammars import MAX_GRAMMAR_CHARS, CompiledGrammar
from tokenspeed_core.api.step import I32, I64, LateInputs, StepPlan
from tokenspeed_core.engine.grammars.backend import GrammarBackend
from tokenspeed_core.engine.grammars.filler import DirectFiller, MaskRow, ThreadFiller
from tokenspeed_core.engine.grammars.pool import CompilePool, GrammarCache, GrammarKey, Refusal
from tokenspeed_core.engine.grammars.sequence import ReasoningTokens, SequenceGrammar
from tokenspeed_core.engine.grammars.trial import Trial
from tokenspeed_core.engine.messages import Reasoning, Rejected, Submit
from tokenspeed_core.scheduler.scheduler import Scheduler

MAX_REASONING_MARKS = 64  # different ones that are kept as tokens

log = logging.getLogger("tokenspeed.engine")


class Grammars:
    """Holds requests until their grammar is compiled, and masks the rows of sequences with a grammar."""

    def __init__(
        self,
        scheduler: Scheduler,
        backend: GrammarBackend,
        pool: CompilePool | None = None,
        mask: I32 | None = None,
    ) -> None:
        """Compile nothing yet. `mask` is the buffer for masks that the runner prefers, int32 [S, W]."""
        self.rejected: list[Rejected] = []
        self._scheduler = scheduler
        self._backend = backend
        self._pool = pool or CompilePool(
            backend.compiler, lambda: Trial(backend.to_wire()), backend.vocab_size
        )
        self._cache = GrammarCache()
        self._held: dict[GrammarKey, list[Submit]] = {}
        self._aborted: set[int] = set()
        self._reasoning: dict[Reasoning, ReasoningTokens] = {}
        if mask is None:
            num_words = -(-backend.vocab_size // 32)
            mask = np.zeros((scheduler.limits.max_sampled, num_words), np.int32)
        self._filler = DirectFiller(mask) if backend.bounds_time else ThreadFiller(mask)

    # -- requests -------------------------------------------------------------------------------------

    @property
    def is_compiling(self) -> bool:
        """Whether grammars are being compiled."""
        return bool(self._held)

    @property
    def num_held(self) -> int:
        """Sequences whose grammar is being compiled."""
        return sum(request.n for held in self._held.values() for request in held)

    def submit(self, request: Submit) -> Rejected | None:
        """Queue a request once its grammar is compiled, or return why it is rejected."""
        grammar = request.grammar
        assert grammar is not None, "requests without a grammar go to the scheduler"
        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            message = f"the grammar has {len(grammar.text)} characters, but at most {MAX_GRAMMAR_CHARS} are allowed"
            return Rejected(request.request_id, "bad_grammar", message)
        key = GrammarKey(grammar.kind, grammar.text)
        known = self._cache.get(key)
        if isinstance(known, Refusal):
            return Rejected(request.request_id, known.reason, known.message)
        if known is not None:
            return self._admit(request, known)
        rejected = self._scheduler.why_rejected(request, self.num_held)
        if rejected is not None:
            return rejected
        if key not in self._held:
            if self._pool.is_full:
                message = "too many grammars are being compiled; try again later"
                return Rejected(request.request_id, "queue_full", message)
            self._pool.start(key)
        self._held.setdefault(key, []).append(request)
        return None

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """End held sequences. Others are ignored."""
        if not self._held:
            return
        self._aborted.update(sequence_ids)
        for key, held in self._held.items():
            self._held[key] = [request for request in held if not self._is_aborted(request)]

    def poll(self, seconds: float = 0.0) -> None:
        """Queue the requests whose grammar is ready. If some are pending, wait up to `seconds` for one."""
        for key, result in self._pool.finished(seconds):
            # An internal failure does not mean that the grammar is invalid.
            if not (isinstance(result, Refusal) and result.reason == "internal"):
                self._cache.put(key, result)
            for request in self._held.pop(key):
                self._release(request, result)
        if not self._held:
            self._aborted.clear()

    def close(self) -> None:
        """End the threads and subprocesses. Does not wait."""
        self._pool.close()
        self._filler.close()

    def _release(self, request: Submit, result: CompiledGrammar | Refusal) -> None:
        ids = _ids(request)
        if isinstance(result, Refusal):
            self._reject(ids, result.reason, result.message)
            return
        rejected = self._admit(request, result)
        if rejected is not None:
            self._reject(ids, rejected.reason, rejected.message)
        self._scheduler.abort(self._aborted.intersection(ids))

    def _is_aborted(self, request: Submit) -> bool:
        return self._aborted.issuperset(_ids(request))

    def _reject(self, sequence_ids: Iterable[int], reason: str, message: str) -> None:
        self.rejected += (Rejected(each, reason, message) for each in sequence_ids)

    def _admit(self, request: Submit, compiled: CompiledGrammar) -> Rejected | None:
        assert request.grammar is not None
        reasoning = self._reasoning_tokens(request.grammar.reasoning)

        def follow() -> SequenceGrammar:
            return SequenceGrammar(
                compiled,
                reasoning,
                min_tokens=request.min_tokens,
                stop_ids=request.stop_token_ids,
            )

        return self._scheduler.submit(request, follow)

    def _reasoning_tokens(self, marks: Reasoning | None) -> ReasoningTokens | None:
        if marks is None:
            return None
        found = self._reasoning.get(marks)
        if found is None:
            if len(self._reasoning) >= MAX_REASONING_MARKS:
                self._reasoning.clear()
            found = self._reasoning[marks] = ReasoningTokens(marks, self._backend.vocabulary)
        return found

    # -- masks ----------------------------------------------------------------------------------------

    def wants(self, plan: StepPlan) -> bool:
        """Whether a row of the plan has a grammar and samples."""
        columns = self._scheduler.columns
        if not columns.num_grammars:
            return False
        return bool((columns.has_grammar[plan.slots] & plan.wants_logits).any())

    def late(self, plan: StepPlan) -> LateInputs | None:
        """Return the masks of the rows with a grammar. Every earlier step has been collected.

        Ends the sequences whose grammar fails, and the requests whose grammar takes too long.
        """
        columns = self._scheduler.columns
        plan_rows = np.flatnonzero(columns.has_grammar[plan.slots] & plan.wants_logits)
        if not len(plan_rows):
            return None
        drafts = _drafts_of(plan, plan_rows)
        rows = [
            self._mask_row(slot, draft)
            for slot, draft in zip(plan.slots[plan_rows].tolist(), drafts, strict=True)
        ]
        mask, too_slow = self._filler.fill(rows)
        row_of_mask = np.repeat(np.arange(len(rows)), [row.num_masks for row in rows])
        failed = [i for i, row in enumerate(rows) if row.grammar.has_failed and i not in too_slow]
        if too_slow or failed:
            self._end(plan.slots[plan_rows], too_slow, failed)
            kept = ~np.isin(row_of_mask, [*too_slow, *failed])
            row_of_mask, mask = row_of_mask[kept], mask[kept]
            if not len(row_of_mask):
                return None
        return LateInputs(plan_rows[row_of_mask].astype(np.int32), mask.reshape(-1))

    def _mask_row(self, slot: int, draft_ids: list[int]) -> MaskRow:
        columns = self._scheduler.columns
        sequence = self._scheduler.sequences.at(slot).sequence
        grammar = sequence.grammar
        assert isinstance(grammar, SequenceGrammar), "the column says that it has a grammar"
        first = sequence.num_prompt + grammar.num_read
        unread = columns.known(slot)[first:].tolist()
        return MaskRow(sequence.request.request_id, grammar, unread, draft_ids)

    def _end(self, slots: I32, too_slow: list[int], failed: list[int]) -> None:
        """End sequences whose grammar took too long or failed."""
        sequences = [self._scheduler.sequences.at(int(slot)).sequence for slot in slots]
        for i in (*too_slow, *failed):
            request = sequences[i].request
            assert request.grammar is not None
            key = GrammarKey(request.grammar.kind, request.grammar.text)
            message = "the grammar became too complex for this output; simplify it"
            if i in too_slow:
                message = "the grammar took too long to find the next tokens; simplify it"
                if request.n == 1:
                    self._cache.put(key, Refusal("bad_grammar", message))
                else:
                    message += f", or ask for fewer answers than n={request.n}"
            log.warning("sequence %d ends: %s", sequences[i].sequence_id, message)
            self._reject([sequences[i].sequence_id], "bad_grammar", message)
            self._scheduler.abort([sequences[i].sequence_id])


def _drafts_of(plan: StepPlan, plan_rows: I64) -> list[list[int]]:
    """Return the draft tokens of some rows of a plan."""
    if plan.draft_token_ids is None:
        return [[]] * len(plan_rows)
    num_drafts = plan.num_query_tokens - 1
    num_drafts[plan.num_decodes :] = 0
    ends = np.cumsum(num_drafts)
    return [
        plan.draft_token_ids[ends[row] - num_drafts[row] : ends[row]].tolist()
        for row in plan_rows.tolist()
    ]


def _ids(request: Submit) -> range:
    return range(request.request_id, request.request_id + request.n)
