"""Comparison of two results: each figure with its change, and the settings that differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.result import is_traffic, runs_of
from tokenspeed_bench.table import aligned, format_users

LESS_IS_BETTER = (
    "s",
    "ms_per_output",
    "first_request_ms",
    "first_over_median",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "ttft_first_turn_p50_ms",
    "ttft_later_turn_p50_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "itl_max_ms",
    "tpot_p50_ms",
    "e2e_p50_ms",
    "e2e_p99_ms",
    "failed",
)
GOODPUT = ("good_share", "good_per_s")
MORE_IS_BETTER = ("out_per_s", "prompt_per_s", "event_share", *GOODPUT)
OTHERS = ("cached_tokens", "uncached_tokens")
FACTS = (
    "kind",
    "model",
    "shape",
    "settings",
    "device",
    "machine",
    "commit",
    "environment",
    "backends",
)

Result = Mapping[str, Any]
Run = Mapping[str, Any]


def compare(before: Result, after: Result, names: tuple[str, str]) -> str:
    """Return the comparison as text. Raises BenchError if the results have no traffic in common."""
    first, second = dict(_keyed(before)), dict(_keyed(after))
    common = [key for key in first if key in second]
    if not any(is_traffic(first[key]) for key in common):
        raise BenchError(
            f"{names[0]} and {names[1]} measured different traffic: {_shown(first)} and {_shown(second)}. "
            "Measure both with the same options."
        )
    cells = [("traffic", "figure", names[0], names[1], "change", "")]
    for key in common:
        cells += _figures(first[key], second[key])
    lines = [aligned(cells)]
    for only, keys, name in ((first, second, names[0]), (second, first, names[1])):
        missing = [key for key in only if key not in keys]
        if missing:
            lines.append(f"only in {name}: {', '.join(_name(key) for key in missing)}")
    lines += [
        f"differs: goals of {_name(key)}: {_text(_goals(first[key]))} -> {_text(_goals(second[key]))}"
        for key in common
        if _goals(first[key]) != _goals(second[key])
    ]
    return "\n".join([*lines, *_differences(before, after)])


def _keyed(result: Result) -> Iterator[tuple[str, Run]]:
    """Yield the runs with the key that must be equal for a comparison; equal keys get a number."""
    seen: dict[str, int] = {}
    for part, run in runs_of(result):
        if run.get("is_part"):
            continue  # an interrupted load sent only a part of its traffic
        pace = {name: value for name, value in run.get("pace", {}).items() if name != "procs"}
        key = json.dumps([part["kind"], run["traffic"], pace], sort_keys=True)
        seen[key] = seen.get(key, 0) + 1
        yield f"{key}\n{seen[key]}", run


def _name(key: str) -> str:
    _, traffic, pace = json.loads(key.partition("\n")[0])
    words = [
        f"{name} {value}"
        for name, value in (traffic | pace).items()
        if name != "name" and value is not None
    ]
    return f"{traffic['name']} ({', '.join(words)})" if words else str(traffic["name"])


def _shown(runs: Mapping[str, Run]) -> str:
    return (
        ", ".join(_name(key) for key, run in runs.items() if is_traffic(run)) or "nothing complete"
    )


def _goals(run: Run) -> Mapping[str, float]:
    return run.get("goals") or {}


def _figures(before: Run, after: Run) -> list[tuple[str, str, str, str, str, str]]:
    label = str(before["traffic"]["name"])
    users = before.get("pace", {}).get("users")
    label += f", {format_users(users)}" if users is not None else ""
    cells = []
    for metric in (*LESS_IS_BETTER, *MORE_IS_BETTER, *OTHERS):
        old, new = before["figures"].get(metric), after["figures"].get(metric)
        if old is None or new is None or (metric in GOODPUT and _goals(before) != _goals(after)):
            continue
        change = "-" if not old else f"{100 * (new - old) / old:+.1f} %"
        cells.append((label, metric, f"{old:,.6g}", f"{new:,.6g}", change, _word(metric, old, new)))
        label = ""
    return cells


def _word(metric: str, old: float, new: float) -> str:
    if metric in OTHERS or old == new:
        return ""
    return "better" if (new > old) == (metric in MORE_IS_BETTER) else "worse"


def _differences(before: Result, after: Result) -> Iterator[str]:
    """Yield a line for each setting and version that differs."""
    pairs = [(fact, before.get(fact), after.get(fact)) for fact in FACTS]
    old, new = before.get("versions", {}), after.get("versions", {})
    pairs += [(name, old.get(name), new.get(name)) for name in sorted({*old, *new})]
    for name, a, b in pairs:
        if a != b:
            yield f"differs: {name}: {_text(a)} -> {_text(b)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
