"""What passes between an API worker and the engine: requests one way, columns of tokens the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from tokenspeed_core.api.step import F32, I32, I64, StepLogprobs
from tokenspeed_core.engine.wire import Codec

WORKER_SHIFT = 40  # a sequence's id, shifted right by so many bits, is the number of its API worker


class FinishReason(IntEnum):
    """Why a sequence ended; 0 while it goes on. Stop strings end sequences in the API worker, as ABORT here."""

    NOT = 0
    STOP = 1  # an end-of-sequence token or a stop token id
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """A request: one prompt, `n` sequences. Everything is resolved; no field means "the default".

    `request_id` is chosen by the API worker and unique: it begins with the worker's number (`WORKER_SHIFT`).
    Sequence i of the request is known to both sides as `request_id + i`, so ids are handed out in strides of `n`.
    """

    tag: ClassVar[str] = "submit"

    request_id: int
    prompt: I32
    n: int
    max_tokens: int
    temperature: float
    top_k: int  # 0: all
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    logprobs: int  # alternatives per token, -1: no log-probabilities
    bias_ids: I32
    bias_values: F32
    stop_token_ids: I32  # the model's end-of-sequence ids among them, unless ignored
    priority: int  # lower runs first, under --schedule-policy priority
    cache_salt: str  # tenants with different salts share no blocks


@dataclass(frozen=True, slots=True, eq=False)
class Abort:
    """Sequences nobody waits for any more. Unknown ids are ignored: they may have finished meanwhile."""

    tag: ClassVar[str] = "abort"

    sequence_ids: I64


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one sequence's new tokens, one entry per token; `top` are alternatives, likeliest first."""

    chosen: Sequence[float]
    ranks: Sequence[int]
    top: Sequence[Sequence[tuple[int, float]]]  # ids and values


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What a step gave the sequences of one API worker, as columns of N.

    Sequence i got `num_tokens[i]` tokens of `token_ids`. `finish` holds `FinishReason` values. The columns of `logprobs`
    have one entry per *token* of the sequences listed in its `rows` (indices into the N), in order; alternatives are
    padded with id -1.
    """

    tag: ClassVar[str] = "outputs"

    sequence_ids: I64
    num_tokens: I32
    token_ids: I32
    finish: I32
    num_cached_tokens: I32  # prompt tokens found in the prefix cache, with the first token; else 0
    logprobs: StepLogprobs | None = None

    def each(self) -> Iterator[tuple[int, list[int], int, int, TokenLogprobs | None]]:
        """Yield each sequence's id, new tokens, `FinishReason`, cached prompt tokens and log-probabilities."""
        tokens, start = self.token_ids.tolist(), 0
        logprobs = {} if self.logprobs is None else self._by_row(self.logprobs)
        columns = zip(
            self.sequence_ids.tolist(),
            self.num_tokens.tolist(),
            self.finish.tolist(),
            self.num_cached_tokens.tolist(),
            strict=True,
        )
        for row, (sequence_id, num_tokens, finish, num_cached) in enumerate(columns):
            yield (
                sequence_id,
                tokens[start : start + num_tokens],
                finish,
                num_cached,
                logprobs.get(row),
            )
            start += num_tokens

    def _by_row(self, logprobs: StepLogprobs) -> dict[int, TokenLogprobs]:
        """Return the log-probability columns of each row (of the N) that has them."""
        chosen, ranks = logprobs.chosen.tolist(), logprobs.ranks.tolist()
        top_ids = logprobs.top_ids.reshape(len(chosen), logprobs.width).tolist()
        top_values = logprobs.top_values.reshape(len(chosen), logprobs.width).tolist()
        tops = (zip(*each, strict=True) for each in zip(top_ids, top_values, strict=True))
        top = [[(other, value) for other, value in each if other >= 0] for each in tops]
        rows, start = {}, 0
        for row in logprobs.rows.tolist():
            its = slice(start, start + int(self.num_tokens[row]))
            rows[row] = TokenLogprobs(chosen[its], ranks[its], top[its])
            start = its.stop
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class Rejected:
    """A request that was not taken. `reason` is "too_long", "queue_full" or "bad_request"."""

    tag: ClassVar[str] = "rejected"

    request_id: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Heartbeat:
    """Sent every second and on change: the engine's heartbeat. `num_steps` grows while steps finish."""

    tag: ClassVar[str] = "heartbeat"

    num_steps: int
    num_running: int
    num_waiting: int
    is_draining: bool


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """The engine can take requests, within these limits; `report` is JSON for people and endpoints.

    `num_kv_tokens` is what the KV pool holds, `vocab_size` the entries of the vocabulary.
    """

    tag: ClassVar[str] = "ready"

    max_model_len: int
    num_kv_tokens: int
    vocab_size: int
    report: str

    @property
    def longest(self) -> int:
        """Most tokens of one sequence, prompt and output together."""
        return min(self.max_model_len, self.num_kv_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """The engine is dead or could not start; `message` ends in what to do."""

    tag: ClassVar[str] = "failed"

    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Drain:
    """Take no more requests; exit when the running ones are done."""

    tag: ClassVar[str] = "drain"


@dataclass(frozen=True, slots=True, eq=False)
class WorkerReady:
    """An API worker can serve. When all of them can, and the engine, each gets a `Ready`."""

    tag: ClassVar[str] = "worker_ready"


to_engine = Codec(Submit, Abort, Drain, WorkerReady)
to_api = Codec(Outputs, Rejected, Heartbeat, Ready, Failed)
