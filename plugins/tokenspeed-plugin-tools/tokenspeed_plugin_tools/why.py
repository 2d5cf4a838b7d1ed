"""`tokenspeed plugins why`: why this kernel, why not that one, and what would change it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from tokenspeed_core.api import PlatformInfo
from tokenspeed_core.commands import Catalog, Entry, Selection, Status
from tokenspeed_core.commands.planning import (
    KernelPlan,
    NothingFitsError,
    PlannedOp,
    Verdict,
    plan_kernels,
)
from tokenspeed_core.commands.settings import ConfigFile, ModelArgument, configure, with_settings
from tokenspeed_plugin_tools.errors import ToolsError
from tokenspeed_plugin_tools.layout import shown

_ARCHITECTURE = re.compile(r"sm_?(1?[1-9]|10)(\d)[af]?\Z")
OVERVIEW = (
    "tokenspeed plugins why OP [MODEL] [OPTIONS]",
    "Say which kernel runs for OP, an op or a family such as attention, of MODEL (none: the bundled demo), why no "
    "other does, and what would change it. Options of serve count as they do there.",
    (
        ("--layer N", "of this layer only"),
        ("--platform NAME", "cpu, or a GPU that need not be here: sm90, sm100"),
        ("--json", "for machines"),
        ("--config FILE", "read settings from a YAML file"),
    ),
)


def _why(
    op: Annotated[str, typer.Argument(metavar="OP", help="an op or a family, such as attention")],
    positional: ModelArgument = None,
    config: ConfigFile = None,
    layer: Annotated[int | None, typer.Option("--layer", min=0, help="of this layer only")] = None,
    platform: Annotated[
        str | None,
        typer.Option("--platform", help="cpu, or a GPU that need not be here: sm90, sm100"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
    *,
    flags: dict[str, Any],
) -> int:
    """Print every candidate for an op of a model, with the reasons; no weights are loaded.

    Where nothing that was asked for fits, those of the op that it ends at are printed, and ToolsError is raised.
    """
    there = None if platform is None else parse_platform(platform)
    if there is not None and "device" in flags:
        raise ToolsError(
            f"--device {flags['device']}: --platform {platform} names the device; leave one out"
        )
    settings = configure(positional, flags, config)
    try:
        catalog, plan = plan_kernels(settings, there)
    except NothingFitsError as error:
        said = str(error).partition("\n")[0]
        refused = [replace(planned, because=_unmet(planned)) for planned in error.plan.ops]
        catalog = Catalog.discover(Selection.read(no_plugins=settings.no_plugins), check=False)
        outside = _outside(catalog, {planned.family for planned in refused})
        if as_json:
            raise ToolsError(said, **_record(error.plan.platform, refused, outside)) from error
        print(shown("\n".join(_lines(error.plan.platform, refused, outside))))
        raise ToolsError(said) from error
    found = plan.find(op, layer)
    if not found:
        raise ToolsError(_not_in(plan, op, layer))
    outside = _outside(catalog, {planned.family for planned in found})
    if as_json:
        print(json.dumps(_record(plan.platform, found, outside), indent=2, ensure_ascii=False))
    else:
        print(shown("\n".join(_lines(plan.platform, found, outside))))
    return 0


why = with_settings(_why)


def parse_platform(text: str) -> PlatformInfo:
    """Return the platform that a user names. Raises ToolsError."""
    if text == "cpu":
        return PlatformInfo("cpu", None, "CPU")
    match = _ARCHITECTURE.match(text.lower())
    if match is None:
        raise ToolsError(
            f"--platform {text}: no such platform; cpu, or a compute capability as sm80, sm90 or sm100"
        )
    major, minor = int(match[1]), int(match[2])
    return PlatformInfo(
        "cuda", (major, minor), f"a GPU of compute capability {major}.{minor} (sm_{major}{minor})"
    )


def _not_in(plan: KernelPlan, op: str, layer: int | None) -> str:
    if layer is not None and plan.find(op):
        layers = sorted({number for planned in plan.find(op) for number in planned.layers})
        there = (
            f"layers {layers[0]} to {layers[-1]}"
            if layers
            else "no layers: it is decided once for all"
        )
        return f"--layer {layer}: {op} has {there}"
    ops = sorted({planned.op for planned in plan.ops})
    near = get_close_matches(op, {*ops, *(planned.family for planned in plan.ops)}, n=1)
    there = f"{f'did you mean {near[0]}? ' if near else ''}it asks for {', '.join(ops)}"
    return f"why {op}: this model asks for no such op; {there}; `plugins list --ops` names all"


def _outside(catalog: Catalog, families: Iterable[str]) -> list[Entry]:
    """Return the entries for these families that were not even candidates."""
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
        if not planned.backend and planned.alternative():
            yield f"           -> {planned.alternative()}"
        for key, value in planned.options:
            yield f"           --backend-option {planned.backend}.{key}={value}"
        seen = {(planned.backend, planned.distribution)}
        for verdict in planned.verdicts:
            if verdict.reasons or (verdict.fits and not planned.backend):
                whose = (verdict.backend, verdict.distribution)
                other = (
                    ", another of its kernels" if whose in seen else ""
                )  # a backend may have several for an op
                yield f"  {'fits  ' if verdict.fits else 'cannot'} {' from '.join(whose)}{other}"
                yield from _reasons(verdict)
                seen.add(whose)
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
        return "nothing that is installed fits"
    return f"{planned.asked_by} asks for {', '.join(planned.wanted)}, and nothing of that fits"


def _layers(layers: Sequence[int]) -> str:
    if not layers:
        return ""
    is_run = len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1
    text = f"{layers[0]}-{layers[-1]}" if is_run else ", ".join(map(str, layers))
    return f" (layers {text})" if len(layers) > 1 else f" (layer {text})"
