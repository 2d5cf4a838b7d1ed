"""Profiles of a server: each load is sent again until some of its steps are recorded."""

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
from tokenspeed_bench.table import format_users
from tokenspeed_bench.trace import Timeline, finished, folder_next_to, named
from tokenspeed_bench.traffic import below
from tokenspeed_core import TokenSpeedError

DISTRIBUTION, KIND = "tokenspeed-bench", "hooks"
MAX_WAIT, MAX_STEPS = (
    256,
    64,
)  # steps that go by until a load is in full swing, and that are recorded

ReportProfile = Callable[[str, str, Timeline], None]


@dataclass(frozen=True, slots=True)
class Profile:
    """The loads to profile, the output file, and the timeout per request in seconds.

    With several loads, each file name contains the load's number and users.
    """

    loads: Sequence[Load]
    path: str
    timeout: float

    def each(self) -> Iterable[tuple[str, str, Load]]:
        """Yield the name, trace file and load of each profile."""
        for number, load in enumerate(self.loads, 1):
            pace = load.pace
            who = (
                format_users(pace.users)
                if pace.rate is None
                else f"{pace.rate:g} arriving per second"
            )
            name = f"{load.traffic.name}, {who}"
            is_one = len(self.loads) == 1
            yield (
                name,
                self.path if is_one else named(self.path, f"{number}-users-{pace.users}"),
                load,
            )


def check_recorder(plugins: object) -> None:
    """Check that the server loads our hooks. Raises BenchError with the reason."""
    entries = (
        [each for each in plugins if isinstance(each, Mapping)] if isinstance(plugins, list) else []
    )
    for entry in entries:
        if (entry.get("distribution"), entry.get("kind")) == (DISTRIBUTION, KIND):
            if entry.get("status") == "ok":
                return
            why = f"are {entry.get('status')}: {entry.get('reason')}"
            raise BenchError(
                f"the hooks of {DISTRIBUTION}, which record the profile, {why}; `tokenspeed plugins list` shows them"
            )
    raise BenchError(
        f"the server does not load the hooks of {DISTRIBUTION}. Reinstall it: pip install "
        f"--force-reinstall --no-deps {DISTRIBUTION}"
    )


def take(
    arguments: Sequence[str], key: str | None, profile: Profile, report: ReportProfile
) -> list[str]:
    """Start a server, send each load and write its trace; return messages for loads without a trace.

    `report` is called with the name, file and timeline of each. Ctrl-C raises KeyboardInterrupt.
    """
    problems: list[str] = []
    try:
        with (
            folder_next_to(profile.path) as folder,
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
                    report(name, path, timeline)
    except TokenSpeedError as error:
        problems.append(f"no profile: {error}")
    return problems


def _record(target: Target, load: Load, name: str, path: str, folder: Path) -> Timeline:
    """Send a load until its trace is recorded, and write the trace. Raises BenchError if there is none."""
    order = Order(Path(path).name, *window(load))
    try:
        order.put(folder)
    except OSError as error:
        raise BenchError(f"{path}: the directory is not writable: {error.strerror}") from error
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
        raise BenchError(f"torch recorded no trace: {why or 'check the free disk space'}")
    if answers.failures:
        raise BenchError(f"the load failed: {most_common(answers.failures)}")
    if not order.is_taken(folder):
        raise BenchError(f"the recorder of {DISTRIBUTION} received no step. See the server log.")
    raise BenchError(
        f"the load had fewer than {1 + order.wait + order.steps} steps. Use more requests or longer "
        "answers (--requests, --output-len)."
    )


def window(load: Load) -> tuple[int, int]:
    """Return how many steps to skip and how many to record.

    Together they are three quarters of the minimum number of steps of the load.
    """
    answers = [[turn.out_len for turn in session.turns] for session in load.traffic.sessions]
    least = max(sum(each) for each in answers)
    if load.pace.rate is None:
        least = max(least, sum(sum(each) for each in answers) // load.pace.users)
    return max(1, min(MAX_WAIT, least // 4)), max(1, min(MAX_STEPS, least // 2))
