"""The time that a draft model adds to steps with prompt tokens."""

from __future__ import annotations

from collections import defaultdict

from tokenspeed_core.scheduler.step_cost import MAX_OUTLIER, next_mean, size_class


class _Mean:
    """Mean seconds. The first step of a kind is often slow, so the second one replaces it."""

    __slots__ = ("num_steps", "seconds")

    def __init__(self) -> None:
        self.num_steps = 0
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.num_steps += 1
        self.seconds = next_mean(self.seconds, max(1, self.num_steps - 1), seconds)


class PromptCost:
    """Mean seconds of steps with prompt tokens, by classes of their tokens: plain steps, and steps with a draft model.

    The draft model runs while the host collects the step that it follows. So it may delay this step or the next one, and
    both count as steps with it.
    """

    def __init__(self) -> None:
        """Start without measurements."""
        self._plain: defaultdict[int, _Mean] = defaultdict(_Mean)
        self._with_model: defaultdict[int, _Mean] = defaultdict(_Mean)
        # The draft model's share of the seconds, of classes with both means.
        self._share: dict[int, float] = {}

    def observe(self, num_tokens: int, seconds: float, *, has_model: bool) -> float:
        """Record a step. Return the seconds that the draft model added to it, 0 if they are unknown.

        A class without plain steps has the share of the nearest class.
        """
        each = size_class(num_tokens)
        plain, mean = self._plain[each], self._with_model[each]
        if not has_model:
            plain.observe(seconds)
            return 0.0
        mean.observe(seconds)
        if min(plain.num_steps, mean.num_steps) > 1:
            self._share[each] = max(0.0, 1.0 - plain.seconds / mean.seconds)
        if not self._share or mean.num_steps == 1:
            return 0.0
        nearest = min(self._share, key=lambda known: abs(known - each))
        return self._share[nearest] * min(seconds, MAX_OUTLIER * mean.seconds)
