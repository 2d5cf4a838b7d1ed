"""Checks whether a request can be queued."""

from __future__ import annotations

from tokenspeed_core.engine.messages import Rejected, Submit
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.sequence_table import SequenceTable


def why_rejected(
    request: Submit, limits: SchedulerLimits, sequences: SequenceTable, max_len: int, num_held: int
) -> Rejected | None:
    """Return why a request cannot be queued, if so.

    A sequence has at most `max_len` tokens. `num_held` sequences wait outside the queue. An idle engine takes any number
    of prompt tokens.
    """
    num_prompt, num_tokens = len(request.prompt), len(request.prompt) + request.max_tokens
    if not 1 <= num_prompt <= num_tokens <= max_len:
        what = (
            f"the prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}; "
            f"the prompt needs at least 1 token, and together they may have at most {max_len}"
        )
        return Rejected(request.request_id, "too_long", what)
    if request.n > limits.max_queued:
        what = f"n is {request.n}, but the queue holds at most {limits.max_queued} sequences"
        return Rejected(request.request_id, "bad_request", what)
    num_waiting = sequences.num_waiting + num_held
    if request.n > limits.max_queued - num_waiting:
        what = f"the queue is full: {num_waiting} of {limits.max_queued} sequences are waiting"
        return Rejected(request.request_id, "queue_full", what)
    num_queued, max_queued = sequences.num_waiting_tokens, limits.max_queued_tokens
    if max_queued is not None and num_queued and num_queued + request.n * num_prompt > max_queued:
        what = f"the queue is full: {num_queued} of {max_queued} prompt tokens are waiting"
        return Rejected(request.request_id, "queue_full", what)
    num_live, max_live = sequences.num_of_tenant(request.tenant), limits.max_live_per_tenant
    if max_live is not None and num_live + request.n > max_live:
        what = (
            f"this API key has {num_live} unfinished sequences and requests {request.n} more, "
            f"but may have at most {max_live}"
        )
        reason = "tenant_limit" if request.n <= max_live else "bad_request"
        return Rejected(request.request_id, reason, what)
    return None
