"""Limits the prompt tokens of a step, so that decoding sequences get their next token in time."""

from __future__ import annotations

from time import perf_counter

MIN_SECONDS = 0.009  # shortest time limit of a step while sequences decode
MAX_SECONDS = 0.05  # longest time limit, if decoding itself is slow
STRETCH = 4.0  # between them, the limit is this multiple of a pure decode step
MAX_ANY_SECONDS = 2.0  # limit of any step: aborts, new requests and the heartbeat wait for it
FIRST_CHUNK = 1024  # prompt tokens until a step is measured
MIN_CHUNK = 256  # smaller chunks use the device badly and are not measured
_MIN_PREFILL_SHARE = 0.1  # of a step's time that its prompt tokens cost at least
_WEIGHT = 0.2  # of the newest step in the running means


class PrefillBudget:
    """Measures the cost of a prompt token and of a pure decode step, and derives a limit for the next step."""

    def __init__(self, max_tokens: int, *, bounds_decode_latency: bool = True) -> None:
        """Start without measurements. `max_tokens` is the token budget of a step.

        With `bounds_decode_latency` False, steps may be long while sequences decode.
        """
        self._max_tokens = max_tokens
        self._bounds_decode_latency = bounds_decode_latency
        self._seconds_per_token = 0.0
        self._decode_seconds = 0.0
        self._last = perf_counter()

    def max_prefill_tokens(self, *, has_decodes: bool) -> int:
        """Return the maximum number of prompt tokens of the next step."""
        if not self._seconds_per_token:
            return min(self._max_tokens, FIRST_CHUNK)
        seconds = MAX_ANY_SECONDS
        if has_decodes and self._bounds_decode_latency:
            decode = self._decode_seconds
            seconds = min(max(STRETCH * decode, MIN_SECONDS), MAX_SECONDS) - decode
        return min(self._max_tokens, max(MIN_CHUNK, int(seconds / self._seconds_per_token)))

    def start_after_idle(self) -> None:
        """Record that an idle device starts a step now."""
        self._last = perf_counter()

    def finish_step(self, num_tokens: int, num_prompt_tokens: int) -> float:
        """Record that a step of `num_tokens` query tokens finished. Returns its duration in seconds."""
        now = perf_counter()
        seconds = now - self._last
        self._last = now
        if num_tokens and not num_prompt_tokens:
            self._decode_seconds += _WEIGHT * (seconds - self._decode_seconds)
        elif num_prompt_tokens >= MIN_CHUNK:
            prefill_seconds = max(seconds - self._decode_seconds, _MIN_PREFILL_SHARE * seconds)
            cost = prefill_seconds / num_prompt_tokens
            old = self._seconds_per_token or cost
            self._seconds_per_token = old + _WEIGHT * (cost - old)
        return seconds
