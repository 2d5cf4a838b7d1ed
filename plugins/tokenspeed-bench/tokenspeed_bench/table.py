"""Runs as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed_bench.baselines import Row
from tokenspeed_bench.speculation import histogram

Run = Mapping[str, Any]


def format_users(num: int) -> str:
    """Return "1 user" or "2 users"."""
    return f"{num} user" + "s" * (num != 1)


def of_run(run: Run) -> str:
    """Return a run as a few lines."""
    name, figures = run["traffic"]["name"], run["figures"]
    lines = [f"{name}: {_numbers(run)}" if len(run["traffic"]) > 1 else name]
    if "pace" in run:
        lines += _served(run)
    elif name in ("start", "first"):
        if "s" in figures:
            lines.append(f"  ready after {figures['s']:.2f} s")
        if "first_request_ms" in figures:
            lines.append(
                f"  first request: first token after {figures['first_request_ms']:.1f} ms, median of the next "
                f"{figures['ttft_p50_ms']:.1f} ms: {figures['first_over_median']:.2f} times"
            )
    else:
        lines += _offline(run)
    if "speculation" in run:
        lines += histogram(run["speculation"])
    lines += [
        f"  floor of {metric}: {each['floor']:g}, {each['ratio']:.2f} times"
        for metric, each in run["floors"].items()
    ]
    return "\n".join(lines)


def _numbers(run: Run) -> str:
    words = [
        f"{name.removeprefix('num_').replace('_', ' ')} {_value(value)}"
        for name, value in run["traffic"].items()
        if name != "name"
    ]
    if "pace" in run:
        rate = run["pace"]["rate"]
        words.insert(
            0,
            format_users(run["pace"]["users"]) if rate is None else f"{rate:g} arriving per second",
        )
    return ", ".join(words)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _offline(run: Run) -> list[str]:
    figures = run["figures"]
    repeats = ", ".join(f"{seconds:.2f}" for seconds in run["repeats_s"])
    return [
        f"  {figures['s']:.3f} s, best of {repeats}",
        f"  {figures['out_per_s']:,.1f} output tokens/s, {figures['ms_per_output']:.3f} ms each; "
        f"{figures['prompt_per_s']:,.1f} prompt tokens/s",
        f"  prompt tokens: {figures['uncached_tokens']:,} computed, {figures['cached_tokens']:,} from the cache",
    ]


def _served(run: Run) -> list[str]:
    figures = run["figures"]
    share = (
        f", events for {100 * figures['event_share']:.1f} % of tokens"
        if "prompt_tokens" in figures
        else ""
    )
    lines = [
        f"  {figures['s']:.2f} s, {figures['answered']:,} answered, {figures['failed']:,} failed"
        + (" (interrupted)" if run.get("is_part") else ""),
        f"  {figures['out_per_s']:,.1f} tokens/s, {figures['events_per_s']:,.1f} events/s{share}",
    ]
    for metric, text in (
        ("ttft", "first token"),
        ("ttft_first_turn", "  of first turns"),
        ("ttft_later_turn", "  of later turns"),
        ("itl", "between tokens"),
        ("tpot", "per token"),
        ("e2e", "whole answer"),
    ):
        if f"{metric}_p50_ms" in figures:
            values = ", ".join(
                f"{name} {figures[f'{metric}_{name}_ms']:,.2f}"
                for name in ("p50", "p90", "p99", "max")
            )
            lines.append(f"  {text + ':':<18}{values} ms")
    if "cached_tokens" in figures:
        lines.append(
            f"  prompt tokens: {figures['uncached_tokens']:,} computed, {figures['cached_tokens']:,} from the cache"
        )
    if run["goals"]:
        goals = " ".join(f"{name}:{goal:g}" for name, goal in run["goals"].items())
        lines.append(
            f"  goodput ({goals}): {100 * figures['good_share']:.1f} % of requests, "
            f"{figures['good_per_s']:.2f} per second"
        )
    if "client" in run:
        client = run["client"]
        lines.append(
            f"  the client alone, {format_users(client['users'])} with an event every {client['beat_ms']:g} ms: "
            f"{client['events_per_s']:,.0f} events/s, gap p99 {client['itl_p99_ms']:.2f} ms"
        )
    return lines + [
        f"  failed {count} times: {message}" for message, count in run["failures"].items()
    ]


def of_rows(rows: Sequence[tuple[Row, float | None, str]]) -> str:
    """Return the table of `anchors`: each row with its value, or the reason for a missing value."""
    head = ("row", "figure", "peer", "must", "aim", "here", "over floor", "")
    cells = [head, *(_row(*each) for each in rows)]
    return aligned(cells)


def _row(row: Row, value: float | None, why: str) -> tuple[str, ...]:
    peer, must, aim = (_number(each) for each in (row.peer, row.must, row.aim))
    if value is None:
        return row.name(), row.metric, peer, must, aim, "-", "-", why
    ratio = row.ratio(value)
    return (
        row.name(),
        row.metric,
        peer,
        must,
        aim,
        _number(value),
        "-" if ratio is None else f"{ratio:.2f}",
        row.verdict(value),
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Return rows with aligned columns: the first two left, numbers right."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 or column == len(row) - 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)
