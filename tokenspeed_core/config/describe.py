"""Settings in words: bounds, defaults and the parameter page."""

from __future__ import annotations

from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ByteSize

from tokenspeed_core.config.backends import BackendChoice
from tokenspeed_core.config.schema import SECTIONS, Config, choices, flag, is_switch, metadata


def bounds(name: str) -> str:
    """Return what a setting takes, such as `1..65536 sequences`, `fcfs|priority` or `TEXT`."""
    if choices(name):
        return "|".join(choices(name))
    field = Config.model_fields[name]
    kinds: tuple[Any, ...] = (field.annotation, *get_args(field.annotation))
    unit = metadata(name)["unit"]
    if ByteSize in kinds:
        return "SIZE"
    if BackendChoice in kinds:
        return "NAME[,NAME...]"
    if dict in {getattr(kind, "__origin__", None) for kind in kinds}:
        return "JSON"
    if tuple in {getattr(kind, "__origin__", None) for kind in kinds}:
        return "N[,N...]"
    if int in kinds or float in kinds:
        return _range(field.metadata) + (f" {unit}" if unit else "")
    return "TEXT"


def _range(rules: list[Any]) -> str:
    low = next((f"above {r.gt}" if isinstance(r, Gt) else str(r.ge) for r in rules if isinstance(r, Gt | Ge)), "")
    high = next((str(r.lt if isinstance(r, Lt) else r.le) for r in rules if isinstance(r, Lt | Le)), "")
    if low and high:
        return f"{low}..{high}" if " " not in low else f"{low}, at most {high}"
    return f"N >= {low}" if low else "N"


def default_of(name: str) -> str:
    """Return a setting's default as a user would write it."""
    value = Config.model_fields[name].default
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def page() -> str:
    """Return the parameter page, in Markdown."""
    lines = [
        "# Parameters",
        "",
        "Generated from `tokenspeed_core/config/schema.py` by `python docs/make_parameters.py`.",
        "",
        "Every setting is a flag of `tokenspeed serve`, a variable `TOKENSPEED_<SETTING>`, a key of the YAML",
        "file of `--config` (the first of these that has it counts), and a keyword of `tokenspeed_core.LLM`.",
    ]
    for section, title in SECTIONS.items():
        lines += ["", f"## {title}", "", "| flag | takes | default | meaning |", "|---|---|---|---|"]
        lines += [_row(name) for name in Config.model_fields if metadata(name)["section"] == section]
    return "\n".join(lines) + "\n"


def _row(name: str) -> str:
    forms = [flag(name), *(f"{flag(name)}.{key}" for key in metadata(name)["narrow"])]
    if name.startswith("enable_"):
        forms.append(f"--no-{flag(name)[2:]}")
    takes = "" if is_switch(name) else f"`{bounds(name)}`".replace("|", "\\|")
    shown = ", ".join(f"`{form}`" for form in forms)
    return f"| {shown} | {takes} | {default_of(name)} | {Config.model_fields[name].description} |"
