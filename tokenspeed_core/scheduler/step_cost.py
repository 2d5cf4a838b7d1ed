"""Keeps the measured times of decode steps by their numbers of rows and draft tokens."""

from __future__ import annotations

MAX_OUTLIER = 8.0  # a longer step is charged as this multiple of the mean
_MAX_GROWTH = 2.0  # a longer step counts as this multiple of the mean in the next mean
_WEIGHT = 0.1  # of the newest step in the running means
_NUM_FIRST = 4  # first steps with some number of draft tokens, of which the fastest counts
_FORGIVEN = 0.2  # share of the time of draft tokens that is forgotten before they are tried again


def size_class(number: int) -> int:
    """Return the class of a number: exact up to 4, then four classes for each power of two."""
    if number <= 4:
        return number
    shift = number.bit_length() - 3
    return 4 * shift + (number >> shift)


class RowsCost:
    """Mean seconds of steps with about the same number of rows: plain steps, and steps by their draft tokens."""

    __slots__ = (
        "_classes",
        "_is_new",
        "_num_early",
        "_num_steps",
        "_seconds",
        "most_tried",
        "num_plain",
        "plain",
        "with_early_proposal",
    )

    def __init__(self, classes: list[int]) -> None:
        """`classes` are the size classes of all numbers of draft tokens."""
        self.plain = 0.0
        self.num_plain = 0
        # Of plain steps during which the drafter proposed nothing worth verifying.
        self.with_early_proposal = 0.0
        self._num_early = 0
        self.most_tried = 0  # draft tokens of a measured step
        self._classes = classes
        # By class of draft tokens. Class 0: the drafter was called, but no token was verified.
        self._seconds = [0.0] * (classes[-1] + 1)
        self._num_steps = [0] * len(self._seconds)
        self._is_new = [False] * len(self._seconds)  # observed since the last `forgive_old`

    def observe_plain(self, seconds: float) -> None:
        """Record a step for which the drafter was not called."""
        self.num_plain += 1
        self.plain = next_mean(self.plain, self.num_plain, seconds)

    def observe_early_proposal(self, seconds: float) -> None:
        """Record a plain step during which the drafter proposed nothing worth verifying."""
        self._num_early += 1
        self.with_early_proposal = next_mean(self.with_early_proposal, self._num_early, seconds)

    def observe(self, num_drafts: int, seconds: float) -> float:
        """Record a step for which the drafter was called. Returns its seconds, limited if it is an outlier."""
        each = self._classes[num_drafts]
        mean, count = self._seconds[each], self._num_steps[each] + 1
        self._num_steps[each] = count
        self._is_new[each] = True
        # The first steps of a kind load code. A high estimate would keep draft tokens from being measured again.
        is_first = mean > 0.0 and count <= _NUM_FIRST
        self._seconds[each] = min(mean, seconds) if is_first else next_mean(mean, count, seconds)
        self.most_tried = max(self.most_tried, num_drafts)
        return min(seconds, MAX_OUTLIER * max(mean, self.plain))

    def forgive_all(self) -> None:
        """Lower the times of steps with draft tokens a little, so that outliers do not stay for ever."""
        for i in range(len(self._seconds)):
            self._forgive(i)

    def forgive_old(self) -> None:
        """Lower the times that were not observed since the last call: the machine may have become faster."""
        for i, is_new in enumerate(self._is_new):
            if not is_new:
                self._forgive(i)
            self._is_new[i] = False

    def _forgive(self, each: int) -> None:
        seconds = self._seconds[each]
        self._seconds[each] = seconds - _FORGIVEN * max(0.0, seconds - self.plain)

    def with_drafts(self, max_drafts: int) -> list[float]:
        """Return the seconds of steps with 0 to `max_drafts` draft tokens for which the drafter was called.

        Times of numbers that were measured less than twice are interpolated. Numbers above `most_tried` get its time.
        More tokens never count as faster.
        """
        found = [self.plain]
        newest, start = self.plain, 0
        for each, (seconds, num_steps) in enumerate(
            zip(self._seconds, self._num_steps, strict=True)
        ):
            if num_steps < 2:
                continue
            previous, newest = newest, max(newest, seconds)
            if each == 0:
                found[0] = newest
                continue
            growth = (newest - previous) / (each - start)
            found += [previous + growth * i for i in range(1, each - start + 1)]
            start = each
        classes = self._classes[: max_drafts + 1]
        found += [newest] * (classes[-1] + 1 - len(found))
        return [found[each] for each in classes]


def next_mean(mean: float, count: int, seconds: float) -> float:
    """Return the running mean after the measurement number `count`."""
    if count == 1 or mean == 0.0:
        return seconds
    weight = max(_WEIGHT, 1 / count)  # an average at first, so that no single step dominates
    return mean + weight * (min(seconds, _MAX_GROWTH * mean) - mean)


class StepCost:
    """The seconds of steps, by classes of their rows."""

    def __init__(self, max_num_seqs: int, max_drafts: int) -> None:
        """Start without measurements. A row has at most `max_drafts` draft tokens."""
        self._row_classes = [size_class(number) for number in range(max_num_seqs + 1)]
        self._classes = [size_class(number) for number in range(max_num_seqs * max_drafts + 1)]
        self._rows: dict[int, RowsCost] = {}

    def of(self, num_rows: int) -> RowsCost:
        """Return the cost of steps with about this many rows."""
        each = self._row_classes[num_rows]
        found = self._rows.get(each)
        if found is None:
            found = self._rows[each] = RowsCost(self._classes)
        return found
