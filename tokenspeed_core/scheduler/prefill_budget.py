"""How many prompt tokens a step may have: as many as fit a time, a short one while others decode."""

from __future__ import annotations

from time import perf_counter

MIN_SECONDS = 0.009  # of a step while sequences decode, whose next tokens wait for it
MAX_SECONDS = 0.05  # likewise, where decoding itself is slow
STRETCH = 4.0  # between the two: so many times as long as a step of decodes alone
PATIENCE_SECONDS = 2.0  # of any step: aborts, arrivals and the pulse wait for it too
FIRST_CHUNK = 1024  # tokens before anything is measured
MIN_CHUNK = (
    256  # fewer tokens use the device badly; chunks smaller than that are not measured either
)
_MIN_SHARE = (
    0.1  # of a step's seconds that its prompt tokens are taken to cost, whatever its decodes cost
)
_WEIGHT = 0.2  # of the newest step in the running means


class PrefillBudget:
    """Learns what a prompt token costs, and what a step of decodes alone costs, from the steps themselves."""

    def __init__(self, largest: int, *, limits_prefill_while_decoding: bool = True) -> None:
        """Start without a measurement; `largest` is the step's whole budget in tokens.

        Without `limits_prefill_while_decoding`, nobody watches tokens come, and only the patience bounds a step.
        """
        self._largest, self._spares_decodes = largest, limits_prefill_while_decoding
        self._seconds_per_token = self._decode_seconds = 0.0
        self._last = perf_counter()

    def max_prefill(self, *, beside_decodes: bool) -> int:
        """Return the most prompt tokens of the next step, all prompts together."""
        if not self._seconds_per_token:
            return min(self._largest, FIRST_CHUNK)
        seconds = PATIENCE_SECONDS
        if beside_decodes and self._spares_decodes:
            decode = self._decode_seconds
            seconds = min(max(STRETCH * decode, MIN_SECONDS), MAX_SECONDS) - decode
        return min(self._largest, max(MIN_CHUNK, int(seconds / self._seconds_per_token)))

    def launched(self) -> None:
        """Note that the device starts on a step now, having been idle."""
        self._last = perf_counter()

    def finished(self, num_tokens: int, num_prompt_tokens: int) -> float:
        """Note that a step of so many query tokens, so many of prompts, is over; return the seconds that it took."""
        now = perf_counter()
        seconds, self._last = now - self._last, now
        if num_tokens and not num_prompt_tokens:
            self._decode_seconds += _WEIGHT * (seconds - self._decode_seconds)
        elif num_prompt_tokens >= MIN_CHUNK:
            cost = max(seconds - self._decode_seconds, _MIN_SHARE * seconds) / num_prompt_tokens
            old = self._seconds_per_token or cost
            self._seconds_per_token = old + _WEIGHT * (cost - old)
        return seconds
