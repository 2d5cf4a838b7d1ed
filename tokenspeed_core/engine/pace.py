"""How many prompt tokens a step may have: as many as fit a time, a short one while others decode."""

from __future__ import annotations

from time import perf_counter

TARGET_SECONDS = 0.05   # of a step while sequences decode, whose next tokens wait for it
PATIENCE_SECONDS = 2.0  # of any step: aborts, arrivals and the pulse wait for it too
FIRST_CHUNK = 1024      # tokens before anything is measured
LEAST_CHUNK = 256
_MEASURED_FROM = 256   # query tokens; smaller steps say little about the cost of a token
_WEIGHT = 0.2          # of the newest step in the running mean


class Pace:
    """Learns the cost of a query token from the steps themselves."""

    def __init__(self, largest: int) -> None:
        """Start without a measurement; `largest` is the step's whole budget in tokens."""
        self._largest = largest
        self._seconds_per_token = 0.0
        self._last = perf_counter()

    def max_prefill(self, *, beside_decodes: bool) -> int:
        """Return the most prompt tokens of the next step, all prompts together."""
        if not self._seconds_per_token:
            return min(self._largest, FIRST_CHUNK)
        seconds = TARGET_SECONDS if beside_decodes else PATIENCE_SECONDS
        return min(self._largest, max(LEAST_CHUNK, int(seconds / self._seconds_per_token)))

    def launched(self) -> None:
        """Note that the device starts on a step now, having been idle."""
        self._last = perf_counter()

    def finished(self, num_tokens: int) -> float:
        """Note that a step of so many query tokens is over; return the seconds that it took."""
        now = perf_counter()
        seconds, self._last = now - self._last, now
        if num_tokens >= _MEASURED_FROM:
            cost = seconds / num_tokens
            old = self._seconds_per_token or cost
            self._seconds_per_token = old + _WEIGHT * (cost - old)
        return seconds
