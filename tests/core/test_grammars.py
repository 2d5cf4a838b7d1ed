"""Structured output in the engine: compiling, masks, phases, and the limits of hostile grammars."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from engine_world import MASKED, MODEL, World, audit
from grammar_backends import EOS, SPEC, VOCAB_SIZE, VOCABULARY, Compiler, Counting, allowed
from hypothesis import given
from hypothesis import strategies as st
from tokenspeed_testing.grammar import VOCABULARY as TEXT_VOCABULARY
from tokenspeed_testing.requests import request

from tokenspeed_core.api.grammars import GrammarError
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import LateInputs, StepPlan, StepResult
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.grammars.backend import GrammarBackend
from tokenspeed_core.engine.grammars.filler import DirectFiller, MaskRow, ThreadFiller
from tokenspeed_core.engine.grammars.pool import (
    CompilePool,
    GrammarCache,
    GrammarKey,
    Refusal,
)
from tokenspeed_core.engine.grammars.sequence import (
    Phase,
    ReasoningTokens,
    SequenceGrammar,
)
from tokenspeed_core.engine.grammars.service import Grammars
from tokenspeed_core.engine.grammars.trial import Trial
from tokenspeed_core.engine.messages import Grammar, Reasoning, Rejected, Submit

END = np.asarray([EOS], np.int32)


class Gate:
    """A checker that waits until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()

    def check(self, kind: str, text: str) -> None:
        if text.startswith("gated"):
            assert self.opened.wait(30)

    def close(self) -> None:
        return None


class GrammarWorld(World):
    """An engine that uses the counting backend for requests with a grammar."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate = Gate()
        self.rejected: dict[int, Rejected] = {}
        compiler = Compiler(VOCABULARY)
        backend = GrammarBackend(cast(Any, None), SPEC, Path(), VOCAB_SIZE, (EOS,))
        backend._vocabulary = VOCABULARY
        pool = CompilePool(lambda: compiler, lambda: self.gate, VOCAB_SIZE, max_pending=3)
        self.grammars = Grammars(self.scheduler, backend, pool)
        # A busy machine may stall a thread longer than by default.
        self.grammars._filler._max_seconds = 0.15  # type: ignore[attr-defined]
        self.engine = Engine(
            self.scheduler, self.engine.runner, depth=self.depth, grammars=self.grammars
        )

    def send(self, submit: Submit) -> Rejected | None:
        rejected = self.engine.submit(submit)
        if rejected is None:
            for i in range(submit.n):
                self.requests[submit.request_id + i] = submit
                self.tokens[submit.request_id + i] = []
                self.scored[submit.request_id + i] = []
        return rejected

    def step(self) -> None:
        super().step()
        self.rejected |= {each.request_id: each for each in self.engine.take_rejected()}

    def check(self, sequence_id: int) -> None:
        submit, got = self.requests[sequence_id], self.tokens[sequence_id]
        if submit.grammar is None:
            super().check(sequence_id)
            return
        tokens = submit.prompt.tolist()
        for i in range(len(got)):
            window = tokens[max(0, len(tokens) - MODEL.window) :]
            mask = [allowed(i, token) for token in range(VOCAB_SIZE)]
            read = tokens if self.model.reads_all else []
            tokens.append(self.model.next_token(read, window, mask))
        assert got == tokens[len(submit.prompt) :]
        assert EOS not in got[:-1]


def structured(request_id: int, prompt: list[int], text: str = "any", **changes: Any) -> Submit:
    """Return a request with a grammar. Its priority keeps drafts away from it."""
    fields = {"priority": MASKED, "stop_token_ids": END, "grammar": Grammar("regex", text)}
    return request(request_id, prompt, **(fields | changes))


@pytest.mark.parametrize("seed", range(0, 40, 10))
def test_random_histories_with_grammars(seed: int) -> None:
    for each in range(seed, seed + 10):
        rng = random.Random(each)
        world = GrammarWorld(
            num_pages=rng.randint(26, 60),
            chunk_size=rng.choice([-1, 5, 16, 64]),
            depth=rng.randint(1, 3),
            policy=rng.choice(["fcfs", "priority"]),
            prefix_caching=rng.random() < 0.7,
            num_drafts=rng.randint(0, 3),
        )
        for sequence_id in range(0, 45, 3):
            base = rng.randint(0, 2) * 5
            prompt = [(base + i) % 60 for i in range(rng.randint(1, 22))] + [rng.randint(0, 59)]
            changes: dict[str, Any] = {"n": rng.choice([1, 1, 3]), "max_tokens": rng.randint(1, 20)}
            if rng.random() < 0.5:
                text = f"any {rng.randint(0, 5)}"
                while world.send(structured(sequence_id, prompt, text, **changes)) is not None:
                    world.step()  # too many different grammars at once
            else:
                world.send(request(sequence_id, prompt, **changes))
            for _ in range(rng.randint(0, 6)):
                world.step()
            if rng.random() < 0.2:
                world.engine.abort([rng.choice(list(world.tokens))])
            slots = np.flatnonzero(world.scheduler.columns.sequence_id >= 0)
            if rng.random() < 0.2 and len(slots):
                world.scheduler.preempt(int(rng.choice(slots.tolist())))
            audit(world.scheduler.kv.pool)
        world.run()
        assert not world.rejected
        for sequence_id in world.tokens:
            world.check(sequence_id)
        assert world.scheduler.columns.num_grammars == 0


def test_sequence_ends_where_its_grammar_ends() -> None:
    world = GrammarWorld()
    for i in range(6):
        world.send(structured(i, [i, 2, 3], max_tokens=30))
    world.run()
    for i in range(6):
        world.check(i)
        is_ended = world.tokens[i][-1] == EOS
        assert world.finish[i] is (FinishReason.STOP if is_ended else FinishReason.LENGTH)


def test_compiling_a_grammar_does_not_delay_other_requests() -> None:
    world = GrammarWorld()
    world.gate.opened.clear()
    world.send(structured(0, [1, 2, 3], "gated"))
    world.send(request(1, [1, 2, 4]))
    while 1 not in world.finish:
        world.step()
    assert world.engine.has_work
    assert world.engine.num_waiting == 1
    assert not world.tokens[0]
    world.gate.opened.set()
    world.run(100_000)
    world.check(0)
    assert 0 in world.finish


def test_invalid_grammar_fails_only_its_request() -> None:
    world = GrammarWorld()
    world.send(structured(0, [1, 2, 3], "invalid", n=2))
    world.send(structured(2, [1, 2, 3]))
    world.run(100_000)
    assert {i: each.reason for i, each in world.rejected.items()} == dict.fromkeys(
        (0, 1), "bad_grammar"
    )
    world.check(2)
    again = world.send(structured(3, [1], "invalid"))
    assert again is not None
    assert again.reason == "bad_grammar", "the refusal is not cached"


def test_number_of_grammars_in_flight_is_bounded() -> None:
    world = GrammarWorld()
    world.gate.opened.clear()
    for i in range(3):
        assert world.send(structured(i, [1, 2], f"gated {i}")) is None
    rejected = world.send(structured(3, [1, 2], "gated 3"))
    assert rejected is not None
    assert rejected.reason == "queue_full"
    assert world.send(structured(4, [1, 2], "gated 0")) is None, "it waits for the same grammar"
    world.gate.opened.set()
    world.run(100_000)
    assert sorted(world.finish) == [0, 1, 2, 4]


def test_aborted_request_is_dropped_while_its_grammar_compiles() -> None:
    world = GrammarWorld()
    world.gate.opened.clear()
    world.send(structured(0, [1, 2], "gated", n=2))
    world.send(structured(2, [1, 2], "gated", n=2))
    world.engine.abort([0, 1, 2])
    world.gate.opened.set()
    world.run(100_000)
    assert sorted(world.finish) == [3]
    world.check(3)
    world.engine.abort([0, 1])
    assert not world.engine.has_work


def test_too_long_request_is_refused_before_it_compiles() -> None:
    world = GrammarWorld()
    too_long = world.send(structured(0, [1] * 40, max_tokens=40))
    assert too_long is not None
    assert too_long.reason == "too_long"
    huge = world.send(structured(0, [1], "x" * 600_000))
    assert huge is not None
    assert huge.reason == "bad_grammar"


@pytest.mark.parametrize("what", ["slow", "failing"])
def test_bad_grammar_ends_only_its_sequence(what: str) -> None:
    world = GrammarWorld()
    world.send(structured(0, [1, 2, 3]))
    world.send(structured(1, [1, 2, 4], what))
    world.send(structured(2, [1, 2, 5]))
    world.send(request(3, [1, 2, 6]))
    world.run(100_000)
    assert list(world.rejected) == [1]
    assert len(world.tokens[1]) == 2
    for i in range(4):
        world.check(i)
    assert sorted(world.finish) == [0, 2, 3]
    again = world.send(structured(4, [1], what))
    assert (again is not None) == (what == "slow")


def test_rows_without_grammar_keep_two_steps_in_flight() -> None:
    class Watched:
        """Notes the order of calls, and which rows are masked."""

        def __init__(self, runner: Any) -> None:
            self.runner = runner
            self.calls: list[tuple[str, int]] = []
            self.masked: dict[int, list[int]] = {}

        def forward(self, plan: StepPlan) -> None:
            self.runner.forward(plan)

        def sample(self, step_id: int, late: LateInputs | None) -> None:
            self.calls.append(("sample", step_id))
            if late is not None:
                self.masked[step_id] = late.rows.tolist()
            self.runner.sample(step_id, late)

        def collect(self, step_id: int) -> StepResult:
            self.calls.append(("collect", step_id))
            result: StepResult = self.runner.collect(step_id)
            return result

        def close(self) -> None:
            self.runner.close()

    world = GrammarWorld()
    world.engine.runner = watched = Watched(world.engine.runner)
    world.send(request(0, [1, 2, 3], max_tokens=6))
    world.run()
    for step in range(2, 6):
        assert watched.calls.index(("sample", step)) < watched.calls.index(("collect", step - 1))
    assert not watched.masked
    watched.calls.clear()
    world.send(request(1, [1, 2, 4], max_tokens=6))
    world.send(structured(2, [1, 2, 5], max_tokens=6))
    world.run()
    assert watched.masked
    assert all(len(rows) == 1 for rows in watched.masked.values())


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 400), st.sampled_from(["get", "put", "bad"])),
        max_size=60,
    )
)
def test_cache_is_bounded_in_number_and_bytes(history: list[tuple[int, int, str]]) -> None:
    cache = GrammarCache(max_grammars=4, max_bytes=1000)
    for number, num_bytes, action in history:
        key = GrammarKey("regex", f"text {number}")
        if action == "get":
            cache.get(key)
            continue
        compiled: Any = type("Compiled", (), {"num_bytes": num_bytes})()
        cache.put(key, compiled if action == "put" else Refusal("bad_request", "no"))
        assert len(cache) <= 4
        assert 0 <= cache.num_bytes <= 1000
        assert num_bytes > 900 or cache.get(key) is not None


class ReadsText:
    """A matcher that records the accepted tokens, and allows "a" only."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.is_terminated = False

    def accept(self, token_id: int) -> bool:
        self.read.append(token_id)
        return True

    def fill(self, row: Any) -> bool:
        row[:] = 0
        row[ord("a") // 32] = 1 << ord("a") % 32
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.read[-num_tokens:]


class AnyText:
    """A grammar with matchers that record the accepted tokens."""

    num_bytes = 0

    def matcher(self) -> ReadsText:
        return ReadsText()


def read(grammar: SequenceGrammar, token_ids: bytes | list[int]) -> None:
    grammar.read(token_ids)


def bits(grammar: SequenceGrammar) -> set[int]:
    row = np.zeros(-(-len(TEXT_VOCABULARY.tokens) // 32), np.int32)
    grammar.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_grammar_starts_after_reasoning_in_text() -> None:
    marks = ReasoningTokens(Reasoning("<think>", "</think>", True), TEXT_VOCABULARY)
    grammar = SequenceGrammar(AnyText(), marks)
    matcher = cast(ReadsText, grammar.matcher)
    assert grammar.phase is Phase.REASONING
    allowed_now = bits(grammar)
    assert {ord("x"), 258} <= allowed_now
    assert not allowed_now & set(TEXT_VOCABULARY.eos_ids), "the reply must not end in the reasoning"
    read(grammar, b"an</thin </think")
    assert grammar.phase is Phase.REASONING
    read(grammar, b">")
    assert grammar.phase is Phase.ANSWER
    assert bits(grammar) == {ord("a")}
    read(grammar, b"a")
    assert matcher.read == [ord("a")]
    assert grammar.num_read == len(b"an</thin </think>a")


def test_reply_may_start_with_reasoning_or_answer() -> None:
    marks = ReasoningTokens(Reasoning("<|call|>", "<|turn|>", False), TEXT_VOCABULARY)
    marks.begin_id, marks.end_id, marks.first_phase = 258, 257, Phase.OPENING
    grammar = SequenceGrammar(AnyText(), marks)
    assert bits(grammar) == {ord("a"), 258}
    read(grammar, [258])
    assert grammar.phase is Phase.REASONING
    read(grammar, [ord("z"), 257])
    assert bits(grammar) == {ord("a")}
    other = SequenceGrammar(AnyText(), marks)
    read(other, b"a")
    assert other.phase is Phase.ANSWER


@pytest.mark.parametrize("kind", [DirectFiller, ThreadFiller])
def test_filler_bounds_the_time_of_a_request(kind: type[DirectFiller | ThreadFiller]) -> None:
    filler = kind(np.zeros((130, VOCAB_SIZE // 32), np.int32))
    rows = [MaskRow(1, SequenceGrammar(Counting("5 ms")), [1, 1]) for _ in range(128)]
    others = [MaskRow(i, SequenceGrammar(Counting("any")), [1, 1]) for i in (2, 3)]
    mask, too_slow = filler.fill([others[0], *rows, others[1]])
    assert sorted(too_slow) == [*range(1, 129)]
    num_filled = sum(row.grammar.num_read > 0 for row in rows)
    assert num_filled < 100  # each takes 5 ms of CPU time; about 9 on an idle machine
    assert mask[0].tolist() == mask[129].tolist() != [0, 0]
    filler.close()


@pytest.mark.parametrize("kind", [DirectFiller, ThreadFiller])
def test_filler_abandons_slow_grammars(kind: type[DirectFiller | ThreadFiller]) -> None:
    filler = kind(np.zeros((20, VOCAB_SIZE // 32), np.int32), max_seconds=0.1)
    grammars = {kind: Counting(kind.partition(" ")[0]) for kind in ("any", "slow", "slow 2")}
    names = ["any", "slow", "any", "slow 2", "slow", *["any"] * 9, "slow"]
    for _ in range(2):
        rows = [
            MaskRow(names.index(kind), SequenceGrammar(grammars[kind]), [1, 1]) for kind in names
        ]
        mask, too_slow = filler.fill(rows)
        assert sorted(too_slow) == [1, 3, 4, 14]
        expected = mask[0].tolist()
        assert any(expected)
        for i, name in enumerate(names):
            if name == "any":
                assert mask[i].tolist() == expected
                assert rows[i].grammar.num_read == 2
    filler.close()


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trial of the backend in `grammar_backends`, on the demo's tokenizer."""
    import tokenspeed_demo

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    folder = Path(tokenspeed_demo.__file__).parent / "checkpoint"
    settings = {
        "spec": "grammar_backends:SPEC",
        "folder": str(folder),
        "vocab_size": VOCAB_SIZE,
        "eos_ids": [2],
    }
    made = Trial(settings, seconds=0.5, max_bytes=1 << 30)
    yield made
    made.close()


def test_hostile_grammars_end_only_the_subprocess(trial: Trial) -> None:
    trial.check("regex", "any")
    with pytest.raises(GrammarError, match="it says so"):
        trial.check("regex", "invalid")
    for hostile in ("endless", "crash"):
        with pytest.raises(GrammarError):
            trial.check("regex", hostile)
        trial.check("regex", "any")


def test_trial_limits_memory(trial: Trial) -> None:
    with pytest.raises(GrammarError):
        trial.check("regex", "huge")
    trial.check("regex", "any")
