"""Profiles a server that is started for it: each load is sent once more, until some of its steps are recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenspeed_bench.client import run
from tokenspeed_bench.connection import Target
from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.online import Load, first_tokens, most_common
from tokenspeed_bench.progress import Progress
from tokenspeed_bench.recorder import VARIABLE, Order
from tokenspeed_bench.server import started
from tokenspeed_bench.table import people
from tokenspeed_bench.trace import Timeline, finished, folder_beside, named
from tokenspeed_bench.traffic import below
from tokenspeed_core import TokenSpeedError

US, KIND = "tokenspeed-bench", "hooks"
MAX_WAIT, MAX_STEPS = (
    256,
    64,
)  # steps that go by until a load is in full swing, and that are recorded

Tell = Callable[[str, str, Timeline], None]


@dataclass(frozen=True, slots=True)
class Profile:
    """What to profile: loads, into which file, and how long a request may take, in seconds.

    Several loads, which are of users and of no rate, have a file each with their number and users in its name.
    """

    loads: Sequence[Load]
    path: str
    timeout: float

    def each(self) -> Iterable[tuple[str, str, Load]]:
        """Yield each load with what people call it and the file of its trace."""
        for number, load in enumerate(self.loads, 1):
            pace = load.pace
            who = people(pace.users) if pace.rate is None else f"{pace.rate:g} arriving a second"
            name = f"{load.traffic.name}, {who}"
            is_one = len(self.loads) == 1
            yield (
                name,
                self.path if is_one else named(self.path, f"{number}-users-{pace.users}"),
                load,
            )


def check_recorder(plugins: object) -> None:
    """Refuse a server whose list of plugins lacks our hooks in use. Raises BenchError, which says why."""
    entries = (
        [each for each in plugins if isinstance(each, Mapping)] if isinstance(plugins, list) else []
    )
    for entry in entries:
        if (entry.get("distribution"), entry.get("kind")) == (US, KIND):
            if entry.get("status") == "ok":
                return
            why = f"are {entry.get('status')}: {entry.get('reason')}"
            raise BenchError(
                f"the hooks of {US}, which record the steps, {why}; `tokenspeed plugins list` shows them"
            )
    raise BenchError(
        f"the server has no hooks of {US}, which record the steps; install it anew: pip install "
        f"--force-reinstall --no-deps {US}"
    )


def take(arguments: Sequence[str], key: str | None, profile: Profile, tell: Tell) -> list[str]:
    """Start a server, send each load and write its trace; return why a load has none.

    `tell` hears of each: its name, file and timeline. Ctrl-C raises KeyboardInterrupt.
    """
    problems: list[str] = []
    try:
        with (
            folder_beside(profile.path) as folder,
            started(arguments, key, {VARIABLE: folder}) as (api, _),
        ):
            target = Target(
                api.url, api.model(), key, profile.timeout, salt=f"bench-{time.time_ns()}"
            )
            end_id, _ = first_tokens(target)
            for name, path, load in profile.each():
                fitting = Load(below(load.traffic, end_id), load.pace)
                try:
                    timeline = _record(target, fitting, name, path, Path(folder))
                except BenchError as error:
                    problems.append(f"{name}: no profile: {error}")
                else:
                    tell(name, path, timeline)
    except TokenSpeedError as error:
        problems.append(f"no profile: {error}")
    return problems


def _record(target: Target, load: Load, name: str, path: str, folder: Path) -> Timeline:
    """Send a load until its trace is there, and write that. Raises BenchError where there is none."""
    order = Order(Path(path).name, *window(load))
    try:
        order.put(folder)
    except OSError as error:
        raise BenchError(f"{path}: nothing can be written beside it: {error.strerror}") from error
    with Progress() as progress:
        answers = run(
            replace(target, salt=f"{target.salt}-{path}"),
            load.traffic.sessions,
            load.pace,
            lambda done, total: progress.say(f"profile of {name}: {done} of {total} requests"),
            lambda: order.is_answered(folder),
        )
    if answers.is_interrupted:
        raise KeyboardInterrupt
    if order.trace(folder).exists():
        return finished(order.trace(folder), path)
    if order.failure(folder).exists():
        why = order.failure(folder).read_text(encoding="utf-8")
        raise BenchError(f"torch recorded none: {why or 'is there room on the disk?'}")
    if answers.failures:
        raise BenchError(f"the load failed: {most_common(answers.failures)}")
    if not order.is_taken(folder):
        raise BenchError(f"no step was told to the hooks of {US}; the server's log may say why")
    raise BenchError(
        f"the load was over in fewer than {1 + order.wait + order.steps} steps; more requests or longer "
        "answers (--requests, --output-len) make it long enough"
    )


def window(load: Load) -> tuple[int, int]:
    """Return how many of a load's steps are to go by before some are recorded, and how many are.

    Together they are three quarters of the steps that a load has at least, where that is not next to none.
    """
    answers = [[turn.out_len for turn in session.turns] for session in load.traffic.sessions]
    least = max(sum(each) for each in answers)
    if load.pace.rate is None:
        least = max(least, sum(sum(each) for each in answers) // load.pace.users)
    return max(1, min(MAX_WAIT, least // 4)), max(1, min(MAX_STEPS, least // 2))
