"""The start-up table of a kernel plan, for the terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from textwrap import wrap

from tokenspeed_core.api.parallel import SAMPLING
from tokenspeed_core.kernels.plan import KernelPlan, PlannedCollective, PlannedOp

_WIDTH = 80  # columns
_HEIGHT = 24  # lines
_MAX_REASONS = 8


def kernel_table(plan: KernelPlan) -> str:
    """Return one line per op and backend, then as many reasons against other backends as fit a screen."""
    grouped: dict[tuple[str, str, str], list[PlannedOp]] = {}
    for planned in plan.ops:
        key = (planned.op, planned.backend, planned.distribution)
        grouped.setdefault(key, []).append(planned)
    rows = [("op", "backend", "from", "for")]
    for (op, backend, distribution), group in grouped.items():
        shares_op = sum(other == op for other, *_ in grouped) > 1
        extent = _extent(group, with_layers=shares_op)
        rows.append((op, backend or "(unfused)", distribution or "-", extent))
    lines = [f"kernels on {plan.platform}", *_aligned(rows)]

    reasons = _reasons(plan)
    room = max(1, min(_MAX_REASONS, _HEIGHT - 2 - len(lines)))
    if reasons:
        lines.append("backends not used:")
    for reason, ops in reasons[:room]:
        line = f"  {reason} ({', '.join(ops)})"
        lines.append(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…")
    if len(reasons) > room:
        op = reasons[room][1][0]
        lines.append(f"  and {len(reasons) - room} more. For one op: tokenspeed plugins why {op}")
    return "\n".join((*lines, *describe_collectives(plan)))


def describe_collectives(plan: KernelPlan) -> Iterator[str]:
    """Yield the bytes of a token in each collective and its reason, equal layers in one line, and the sums.

    Those of the draft model follow under their own heading, because a step has several passes of it. The last line
    says why no all-reduce is fused, if the default fuses none. A plan without collectives has no lines.
    """
    for is_draft, heading, kind in (
        (False, "collectives:", "sampled"),
        (True, "collectives of the draft model: in each pass,", "draft"),
    ):
        found = [each for each in plan.collectives if each.is_draft == is_draft]
        if not found:
            continue
        last = [each for each in found if each.collective.target == SAMPLING]
        total, more = (sum(each.sent_bytes_per_token for each in some) for some in (found, last))
        yield f"{heading} each process sends {total - more:,} B per token, and {more:,} B more per {kind} token"
        lines = Counter(_describe_collective(each) for each in found)
        for (what, reason), count in lines.items():
            yield f"  {count} x {what}"
            yield f"      {reason}"
    if plan.not_fused and any(each.collective.op == "all_reduce" for each in plan.collectives):
        yield f"  no all-reduce is fused with a norm: {plan.not_fused}"


def _describe_collective(planned: PlannedCollective) -> tuple[str, str]:
    """Return two lines: the op with its group and bytes, and the reason without layer numbers."""
    each = planned.collective
    size = f"{planned.bytes_per_token:,} B per token"
    where = f"{each.group}, {planned.num_processes} processes"
    fusion = (
        f", as {each.fused_op} in steps of up to {each.max_fused_tokens:,} tokens"
        if each.max_fused_tokens
        else ""
    )
    return f"{each.op} ({where}): {size}{fusion}", re.sub(r"\.\d+\.", ".*.", each.reason)


def _aligned(rows: list[tuple[str, str, str, str]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    indent = " " * min(sum(widths) + 6, _WIDTH // 2)
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield from wrap(
            "  ".join([*cells, row[3]]).rstrip(),
            _WIDTH,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _reasons(plan: KernelPlan) -> list[tuple[str, list[str]]]:
    """Return the first reason against each backend, each with the ops that it concerns.

    Backends that a flag names, but that have no kernel for an op, come first.
    """
    ops: dict[tuple[str, str], dict[str, None]] = {}
    verdicts = [(planned, verdict) for planned in plan.ops for verdict in planned.verdicts]
    for planned, verdict in sorted(verdicts, key=lambda pair: not pair[1].is_absent):
        if verdict.reasons and verdict.backend != planned.backend:
            key = (verdict.backend, verdict.reasons[0].what)
            ops.setdefault(key, {})[planned.op] = None
    return [(f"{backend}: {why}", list(names)) for (backend, why), names in ops.items()]


def _extent(group: list[PlannedOp], *, with_layers: bool) -> str:
    """Return the phases of a table row, its layers if other rows share the op, and the user's options."""
    words = [planned.axis("phase") for planned in group if planned.axis("phase")]
    layers = format_layers(group)
    if with_layers and layers:
        words.append(f"layers {layers}")
    words += [f"{key}={value}" for planned in group for key, value in planned.options]
    return ", ".join(dict.fromkeys(words))


def format_layers(group: Iterable[PlannedOp]) -> str:
    """Return the layers of decisions with runs shortened: 0, 1, 2 and 5 are "0-2, 5"."""
    numbers = sorted({layer for planned in group for layer in planned.layers})
    runs = [list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(
        str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs
    )
