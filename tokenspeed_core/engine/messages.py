"""The messages between API workers and the engine: requests to the engine, and columns of tokens back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tokenspeed_core.api.grammars import GrammarKind
from tokenspeed_core.api.step import F32, I32, I64, StepLogprobs
from tokenspeed_core.engine.stats import EngineStats
from tokenspeed_core.engine.wire import Codec, Message

# A sequence id, shifted right by this many bits, is the number of its API worker.
WORKER_SHIFT = 40


class Reasoning(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The marks of a reply's reasoning, which the reply's grammar does not cover.

    With `is_open`, the reply starts inside the reasoning. Otherwise it may start with `begin`.
    """

    begin: str
    end: str
    is_open: bool


class Grammar(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The grammar of a request's output, and the marks of reasoning that precedes it, if any."""

    kind: GrammarKind
    text: str
    reasoning: Reasoning | None = None


class Submit(Message, frozen=True, tag="submit"):
    """A request: one prompt and `n` sequences, with every default filled in.

    The API worker chooses a unique `request_id`, prefixed with the worker's number (`WORKER_SHIFT`).
    Sequence i of the request has the id `request_id + i`, so request ids are allocated in strides of `n`.
    """

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
    stop_token_ids: I32  # including the model's end-of-sequence ids, unless ignored
    priority: int  # lower runs first, under --schedule-policy priority
    cache_salt: str  # requests with different salts share no KV blocks
    min_tokens: int = 0  # output tokens before the first stop token
    # Alternatives per prompt token, for the first sequence; -1: no log-probabilities of the prompt.
    prompt_logprobs: int = -1
    grammar: Grammar | None = None
    # Who sent it. Tenants take turns in the queue and share no KV blocks.
    tenant: str = ""
    # JSON: parameters of logits processors by their names; "": none.
    processors: str = ""

    @property
    def sequence_ids(self) -> range:
        """The ids of the `n` sequences."""
        return range(self.request_id, self.request_id + self.n)

    @property
    def cache_namespace(self) -> str:
        """The tenant and its salt. A request must not affect requests of another namespace."""
        return f"{self.tenant}\0{self.cache_salt}" if self.tenant else self.cache_salt


class Abort(Message, frozen=True, tag="abort"):
    """Stop these sequences. The engine ignores unknown ids: a sequence may have just finished."""

    sequence_ids: I64


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one sequence's new tokens, one entry per token."""

    chosen: Sequence[float]
    ranks: Sequence[int]
    top: Sequence[Sequence[tuple[int, float]]]  # alternatives (id, log-probability), best first


class SequenceDelta(msgspec.Struct, frozen=True):
    """The tokens that a step added to a sequence."""

    sequence_id: int
    token_ids: list[int]
    finish: int  # a FinishReason
    num_cached_tokens: int
    logprobs: TokenLogprobs | None


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a sequence's next N prompt tokens, starting with the second token of the prompt.

    `chosen` and `ranks` are [N], `top_ids` and `top_values` flat [N * width].
    """

    sequence_id: int
    width: int
    chosen: F32
    ranks: I32
    top_ids: I32
    top_values: F32


class Outputs(Message, frozen=True, tag="outputs"):
    """The results of a step for the N sequences of one API worker, as columns.

    Sequence i got `num_tokens[i]` tokens of `token_ids`. The columns of `logprobs` have one entry per
    *token* of the sequences listed in its `rows` (indices into the N), in order; alternatives are padded
    with id -1. `prompts` are log-probabilities of prompts, also of sequences without a row.
    """

    sequence_ids: I64
    num_tokens: I32
    token_ids: I32
    finish: I32  # FinishReason values
    num_cached_tokens: I32  # prompt tokens found in the prefix cache, with the first token; else 0
    logprobs: StepLogprobs | None = None
    prompts: tuple[PromptLogprobs, ...] = ()

    def each(self) -> Iterator[SequenceDelta]:
        """Yield the delta of each sequence."""
        tokens, start = self.token_ids.tolist(), 0
        logprobs = {} if self.logprobs is None else self._logprobs_by_row(self.logprobs)
        columns = zip(
            self.sequence_ids.tolist(),
            self.num_tokens.tolist(),
            self.finish.tolist(),
            self.num_cached_tokens.tolist(),
            strict=True,
        )
        for row, (sequence_id, num_tokens, finish, num_cached) in enumerate(columns):
            token_ids = tokens[start : start + num_tokens]
            yield SequenceDelta(sequence_id, token_ids, finish, num_cached, logprobs.get(row))
            start += num_tokens

    def _logprobs_by_row(self, logprobs: StepLogprobs) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities of each row that has them; keys index the N sequences."""
        chosen, ranks = logprobs.chosen.tolist(), logprobs.ranks.tolist()
        top_ids = logprobs.top_ids.reshape(len(chosen), logprobs.width).tolist()
        top_values = logprobs.top_values.reshape(len(chosen), logprobs.width).tolist()
        top = []
        for ids, values in zip(top_ids, top_values, strict=True):
            pairs = zip(ids, values, strict=True)
            top.append([(token_id, value) for token_id, value in pairs if token_id >= 0])
        rows, start = {}, 0
        for row in logprobs.rows.tolist():
            entries = slice(start, start + int(self.num_tokens[row]))
            rows[row] = TokenLogprobs(chosen[entries], ranks[entries], top[entries])
            start = entries.stop
        return rows


class Rejected(Message, frozen=True, tag="rejected"):
    """The engine did not accept a request.

    `reason` is "too_long", "queue_full", "tenant_limit", "bad_grammar" or "bad_request"; "internal" if the server
    is at fault.
    """

    request_id: int
    reason: str
    message: str


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """The engine is alive: sent every second, and when work begins or ends."""

    num_steps: int  # completed steps
    num_running: int
    num_waiting: int
    is_draining: bool
    stats: EngineStats | None = None


class Ready(Message, frozen=True, tag="ready"):
    """The engine accepts requests within these limits."""

    max_model_len: int
    num_kv_tokens: int  # capacity of the KV cache
    vocab_size: int
    report: str  # JSON: model, plugins and kernel plan
    is_bidirectional: bool = False  # tokens of a prompt attend to later ones

    @property
    def longest(self) -> int:
        """Maximum tokens of a sequence, prompt and output together."""
        return min(self.max_model_len, self.num_kv_tokens)


class Failed(Message, frozen=True, tag="failed"):
    """The engine died or could not start; `message` says why and what to do."""

    message: str


class Drain(Message, frozen=True, tag="drain"):
    """Accept no more requests; exit when the running requests are finished."""


class WorkerReady(Message, frozen=True, tag="worker_ready"):
    """An API worker is ready. When all workers and the engine are ready, each worker receives a `Ready`."""


to_engine = Codec(Submit, Abort, Drain, WorkerReady)
to_api = Codec(Outputs, Rejected, Heartbeat, Ready, Failed)
