"""`tokenspeed plugins why`: the kernel of an op, the reasons against the others, and how to change the choice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from tokenspeed_core.api import PlatformInfo
from tokenspeed_core.commands import Catalog, Entry, Selection, Status, kind_of
from tokenspeed_core.commands.planning import (
    KernelPlan,
    NothingFitsError,
    PlannedOp,
    Verdict,
    describe_collectives,
    installed_ops,
    plan_kernels,
)
from tokenspeed_core.commands.settings import (
    ConfigFile,
    ModelArgument,
    config_of,
    configure,
    with_settings,
)
from tokenspeed_plugin_tools.errors import ToolsError
from tokenspeed_plugin_tools.text import printable

_ARCHITECTURE = re.compile(r"sm_?(1?[1-9]|10)(\d)[af]?\Z")
COLLECTIVES = "comm"  # the family of their ops
OVERVIEW = (
    "tokenspeed plugins why OP [MODEL] [OPTIONS]",
    "Show which kernel runs for OP (an op or a family such as attention) of MODEL (default: the bundled demo), "
    "and why no other kernel does. The options of serve have the same effect as there.",
    (
        ("--layer N", "Show one layer."),
        (
            "--platform NAME",
            "Select for cpu or a GPU such as sm90 or sm100, which need not be present.",
        ),
        ("--json", "Print JSON."),
        ("--config FILE", "Read settings from a YAML file."),
    ),
)


def _why(
    op: Annotated[str, typer.Argument(metavar="OP", help="An op or a family, such as attention.")],
    positional: ModelArgument = None,
    config: ConfigFile = None,
    layer: Annotated[int | None, typer.Option("--layer", min=0, help="Show one layer.")] = None,
    platform: Annotated[
        str | None,
        typer.Option("--platform", help="Select for cpu or a GPU such as sm90."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    flags: dict[str, Any],
) -> int:
    """Print every candidate kernel for an op of a model, with the reasons. Loads no weights.

    Raises ToolsError if no requested kernel fits, after printing the candidates.
    """
    target = None if platform is None else parse_platform(platform)
    if target is not None and "device" in flags:
        raise ToolsError(
            f"--device {flags['device']}: --platform {platform} already selects the device; remove one of them"
        )
    settings = configure(config_of("serve"), positional, flags, config)
    try:
        catalog, plan = plan_kernels(settings, target)
    except NothingFitsError as error:
        message = str(error).partition("\n")[0]
        refused = [replace(planned, because=_unmet(planned)) for planned in error.plan.ops]
        catalog = Catalog.discover(Selection.read(no_plugins=settings.no_plugins), check=False)
        outside = _outside(catalog, {planned.family for planned in refused})
        if as_json:
            raise ToolsError(message, **_record(error.plan.platform, refused, outside)) from error
        print(printable("\n".join(_lines(error.plan.platform, refused, outside))))
        raise ToolsError(message) from error
    found = plan.find(op, layer)
    if not found:
        raise ToolsError(_describe_missing(catalog, plan, op, layer))
    outside = _outside(catalog, {planned.family for planned in found})
    has_collectives = any(planned.family == COLLECTIVES for planned in found)
    if as_json:
        record = _record(plan.platform, found, outside)
        record["collectives"] = [asdict(each) for each in plan.collectives if has_collectives]
        print(json.dumps(record, indent=2, ensure_ascii=False))
    else:
        print(printable("\n".join(_lines(plan.platform, found, outside))))
        if has_collectives:
            print("\n".join(("", *describe_collectives(plan))))
    return 0


why = with_settings(config_of("serve"), _why)


def parse_platform(text: str) -> PlatformInfo:
    """Return the platform of that name. Raises ToolsError."""
    if text == "cpu":
        return PlatformInfo("cpu", None, "CPU")
    match = _ARCHITECTURE.match(text.lower())
    if match is None:
        raise ToolsError(
            f"--platform {text}: no such platform; use cpu or a compute capability such as sm80, sm90 or sm100"
        )
    major, minor = int(match[1]), int(match[2])
    return PlatformInfo(
        "cuda", (major, minor), f"a GPU of compute capability {major}.{minor} (sm_{major}{minor})"
    )


def _describe_missing(catalog: Catalog, plan: KernelPlan, op: str, layer: int | None) -> str:
    if layer is not None and plan.find(op):
        layers = sorted({number for planned in plan.find(op) for number in planned.layers})
        there = (
            f"layers {layers[0]} to {layers[-1]}" if layers else "no layers: one kernel serves all"
        )
        return f"--layer {layer}: {op} has {there}"
    contract = installed_ops(catalog).get(op)
    if not plan.collectives and COLLECTIVES in (op, contract and contract.family):
        return (
            f"why {op}: one process has no collectives; add --tp 2, or --data-parallel-size 2 with "
            "--enable-expert-parallel"
        )
    ops = sorted({planned.op for planned in plan.ops})
    if contract is not None:
        return f"why {op}: this model does not use {op} with these options; its ops are {', '.join(ops)}"
    near = get_close_matches(op, {*ops, *(planned.family for planned in plan.ops)}, n=1)
    there = f"{f'did you mean {near[0]}? ' if near else ''}its ops are {', '.join(ops)}"
    if kind_of(op) is not None and not op.startswith("kernels"):
        return f"why {op}: only kernels are explained; `plugins list` shows the installed {op}"
    return f"why {op}: this model uses no such op; {there}; `plugins list --ops` lists all ops"


def _outside(catalog: Catalog, families: Iterable[str]) -> list[Entry]:
    """Return the entries of these families that cannot be used."""
    kinds = {f"kernels.{family}" for family in families}
    return [
        entry for entry in catalog.all() if entry.kind in kinds and entry.status is not Status.OK
    ]


def _record(platform: str, found: Sequence[PlannedOp], outside: Sequence[Entry]) -> dict[str, Any]:
    return {
        "platform": platform,
        "ops": [{**asdict(planned), "problem": dict(planned.problem)} for planned in found],
        "not_considered": [asdict(entry) for entry in outside],
    }


def _lines(platform: str, found: Sequence[PlannedOp], outside: Sequence[Entry]) -> Iterator[str]:
    yield f"on {platform}"
    for planned in found:
        yield ""
        yield f"{planned.op}{_layers(planned.layers)}: {', '.join(f'{name}={v}' for name, v in planned.problem)}"
        chosen = f"{planned.backend} from {planned.distribution}" if planned.backend else "nothing"
        yield f"  runs   {chosen}: {planned.because}"
        if planned.note:
            yield f"           {planned.note}"
        if not planned.backend and planned.alternative():
            yield f"           -> {planned.alternative()}"
        for key, value in planned.options:
            yield f"           --backend-option {planned.backend}.{key}={value}"
        seen = {(planned.backend, planned.distribution)}
        for verdict in planned.verdicts:
            if verdict.reasons or (verdict.fits and not planned.backend):
                owner = (verdict.backend, verdict.distribution)
                # A backend may have several kernels for an op.
                other = ", another kernel" if owner in seen else ""
                yield f"  {'fits  ' if verdict.fits else 'not   '} {' from '.join(owner)}{other}"
                yield from _reasons(verdict)
                seen.add(owner)
    if outside:
        yield "\nnot considered"
    for entry in outside:
        yield f"  {entry.name} from {entry.distribution} {entry.version}: {entry.status}: {entry.reason}"


def _reasons(verdict: Verdict) -> Iterator[str]:
    for reason in verdict.reasons:
        yield f"           {reason.what}"
        if reason.hint:
            yield f"           -> {reason.hint}"


def _unmet(planned: PlannedOp) -> str:
    if planned.asked_by == "auto":
        return "no installed kernel fits"
    return f"{planned.asked_by} selects {', '.join(planned.wanted)}, and none of them fits"


def _layers(layers: Sequence[int]) -> str:
    if not layers:
        return ""
    is_run = len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1
    text = f"{layers[0]}-{layers[-1]}" if is_run else ", ".join(map(str, layers))
    return f" (layers {text})" if len(layers) > 1 else f" (layer {text})"
