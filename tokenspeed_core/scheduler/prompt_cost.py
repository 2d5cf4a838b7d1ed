"""Estimates the time that a draft model adds to steps with prompt tokens."""

from __future__ import annotations

from collections import defaultdict

from tokenspeed_core.scheduler.step_cost import next_mean, size_class

_SHORT_CONTEXT = 2048  # tokens; shorter contexts hardly change a step's time
_MAX_OUTLIER = 20.0  # a longer step counts as this multiple of the mean without the model
_KEPT = 0.95  # weight of earlier differences, for each new one


class _Mean:
    """Mean seconds. The first step of a kind is often slow, so the second one replaces it."""

    __slots__ = ("num_steps", "seconds")

    def __init__(self) -> None:
        self.num_steps = 0
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.num_steps += 1
        self.seconds = next_mean(self.seconds, max(1, self.num_steps - 1), seconds)


class _Line:
    """Fits seconds as a constant and a time per token, by least squares. Old measurements fade."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._max_tokens = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._weight = _KEPT * self._weight + 1.0
        self._tokens = _KEPT * self._tokens + num_tokens
        self._seconds = _KEPT * self._seconds + seconds
        self._squares = _KEPT * self._squares + num_tokens * num_tokens
        self._products = _KEPT * self._products + num_tokens * seconds
        self._max_tokens = max(self._max_tokens, num_tokens)

    def at(self, num_tokens: int) -> float:
        """Return the seconds of this many tokens, or of the most that were measured; 0 without measurements."""
        if not self._weight:
            return 0.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - tokens * tokens
        covariance = self._products / self._weight - tokens * seconds
        # Rounding leaves a small variance if all numbers of tokens are equal.
        per_token = max(0.0, covariance / variance) if variance > 1.0 else 0.0
        return max(0.0, seconds + per_token * (min(num_tokens, self._max_tokens) - tokens))


class PromptCost:
    """Estimates the time that a draft model adds to steps with prompt tokens.

    Steps with the model are compared with plain ones that have about as many tokens and about as much context. The
    differences are fitted for all kinds of steps together, so that kinds without plain steps have an estimate too.
    """

    def __init__(self) -> None:
        """Start without measurements."""
        self._plain: defaultdict[tuple[int, int], _Mean] = defaultdict(_Mean)
        self._num_with_model: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._added = _Line()
        self.newest: float | None = None  # the last estimate, in seconds; None: there was none

    def observe(
        self, num_tokens: int, seconds: float, *, num_followed: int, mean_context: int = 0
    ) -> float:
        """Record a step. Return the estimated seconds that the draft model added to it; 0 if they are unknown.

        The draft model runs while the host collects the step that it follows. So it may delay this step or the next one.
        `num_followed` are the tokens of all its passes that may have delayed this step; 0: it is a plain step.
        """
        kind = size_class(num_tokens), (mean_context // _SHORT_CONTEXT).bit_length()
        plain = self._plain[kind]
        if not num_followed:
            plain.observe(seconds)
            return 0.0
        self._num_with_model[kind] += 1
        is_first = self._num_with_model[kind] == 1  # it is often slow, and is not fitted
        if plain.num_steps > 1 and not is_first:
            added = min(seconds, _MAX_OUTLIER * plain.seconds) - plain.seconds
            self._added.observe(num_followed, added)
            self.newest = self._added.at(num_followed)
        return self._added.at(num_followed)
