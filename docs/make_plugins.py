"""Write docs/plugins.md: a section for each kind, of what the code says of it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenspeed_plugin_tools.new import RECIPES

from tokenspeed_core import api
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.spec import KernelSpec
from tokenspeed_core.plugins import hookspecs
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.deprecations import DEPRECATED
from tokenspeed_core.plugins.kinds import KERNELS_PREFIX, KINDS
from tokenspeed_core.plugins.selection import Selection
from tokenspeed_core.testing.distribution import DistributionConformance, core_range
from tokenspeed_core.testing.kernel import KernelConformance
from tokenspeed_core.testing.model import ModelConformance
from tokenspeed_core.testing.parser import ParserConformance
from tokenspeed_core.testing.policy import PolicyConformance

FOLDER = Path(__file__).parent
HEAD = FOLDER / "plugins.head.md"
SUITES = (DistributionConformance, KernelConformance, ModelConformance, ParserConformance, PolicyConformance)

PARSERS = (api.ParserSpec, api.ParserContext, api.ReplyParser, api.ReplyEvent)

# kind: (what it is for, the class of the entry's value or all that matter, where it is chosen)
ABOUT: dict[str, tuple[str, Any, str]] = {
    "models": ("A model family. The entry's name is the one in `architectures` of config.json.", api.ModelSpec,
               "chosen by the checkpoint"),
    "load_formats": ("A way to read weights.", api.LoadFormat, "`--load-format NAME`, or by the files that are there"),
    "quantization": ("A way to compute linear maps in fewer bits.", api.Quantization, "`--quantization NAME`"),
    "checkpoints": ("A name for a checkpoint in a package.", None, "`tokenspeed serve NAME`"),
    "ops": ("Contracts of ops that the core does not know. The value is an OpContract or a tuple of them; the entry's "
            "name is for people.", api.OpContract, "asked for by models"),
    "rankings": ("Which backends a benchmark found to be the fastest, for `auto`. TokenSpeed's own alone: no plugin "
                 "ranks itself.", api.Ranking, "`auto`"),
    "hooks": ("Behaviour: the entry's value is a module whose functions are marked `@hookimpl`. A module with a hook "
              "that does not exist is left out, and said to be.", None, "every installed one is called"),
    "commands": ("A subcommand: the value is a function that takes the words after it and returns the exit status. "
                 "Only `tokenspeed_core.commands` is there for it besides the api.", None, "`tokenspeed NAME`"),
    "locks": ("What writes and checks `plugins.lock`. TokenSpeed's own alone: a stranger's entry is not asked.", None,
              "`--plugins-lock FILE`"),
    "tool_parsers": ("What finds tool calls in a chat's reply, where the request offered tools. It reads the content "
                     "that a reasoning parser leaves.", PARSERS, "`--tool-call-parser NAME`"),
    "reasoning_parsers": ("What finds the reasoning in a chat's reply. The classes are those of tool parsers, above.",
                          None, "`--reasoning-parser NAME`"),
    "policies": ("A scheduling policy: the entry's value is a factory without parameters.", api.Policy,
                 "`--schedule-policy NAME`"),
}
FLAGS = {"attention": "--attention-backend", "moe": "--moe-backend", "sampling": "--sampling-backend"}


def page() -> str:
    """Return the page."""
    ours = Catalog.discover(Selection(frozenset()), check=False)
    filled = {"CORE_RANGE": core_range(), "API_NOW": api.API_VERSION, "DEPRECATIONS": deprecations()}
    head = HEAD.read_text(encoding="utf-8")
    for word, text in filled.items():
        head = head.replace(word, text)
    parts = [
        head,
        *kernels(ours), *kinds(), *unused(), *hooks(), *kit(), *matrix(ours),
    ]
    return "\n".join(parts).rstrip() + "\n"


def deprecations() -> str:
    """Return what is deprecated now, for the page's head."""
    rows = [f"\n- `{old}` {each}" for old, each in DEPRECATED.items()]
    return "Deprecated now:\n" + "".join(rows) if rows else "Nothing is deprecated today."


def kernels(catalog: Catalog) -> Iterator[str]:
    """Yield the section of kernels, with every op that has a contract."""
    yield f"""## Kernels: `tokenspeed.kernels.FAMILY` [api{KINDS["kernels.attention"].api}]

An entry's name is the *backend* that users type; its value is a KernelSpec or a tuple of them, one for each op that the
backend computes. Made by `tokenspeed plugins new attention|moe|linear|sampling`. Chosen by
{", ".join(f"`{flag}`" for flag in FLAGS.values())}, each with a list of names, and by `auto` for every family.
"""
    yield from described(api.KernelSpec)
    yield from described(api.Capability)
    yield from described(api.AxisLimit)
    yield "An attention kernel is built by an AttentionFactory, and prepared once a step for all layers:\n"
    for each in (api.AttentionProblem, api.AttentionLimits, api.AttentionStep):
        yield from described(each)
    yield """### The ops

What `load` builds is called as the signature says. The family is in the group's name. These are the ops that every
installation has; plugins bring more, such as those of block-scaled operands and of latent attention:
`tokenspeed plugins list --ops` names all that are installed, with who brings and who computes each, and
`tokenspeed plugins info DIST` has the contracts of what a distribution brings, as below (`--json`: whole).
"""
    for op in sorted(installed_ops(catalog).values(), key=lambda op: (op.family, op.name)):
        axes = "; ".join(f"`{axis}` {meaning}" for axis, meaning in op.axes.items())
        worst = ", ".join(f"{t.dtype} {t.relative:g}" for t in op.tolerances)
        notes = [f"in place: {', '.join(op.mutates)}"] if op.mutates else []
        notes += [f"fused of {' + '.join(op.parts)}"] if op.parts else []
        yield f"- **`{op.name}`** ({op.family}): `{op.signature}`  \n  axes: {axes}  \n  tolerance: {worst}" + (
            "  \n  " + "; ".join(notes) if notes else "")
    yield ""


def kinds() -> Iterator[str]:
    """Yield a section for each other kind that is used."""
    made = {recipe.group: kind for kind, recipe in RECIPES.items()}
    for kind, each in KINDS.items():
        if kind.startswith(KERNELS_PREFIX) or not each.is_used:
            continue
        text, value, chosen = ABOUT[kind]
        yield f"## {kind.replace('_', ' ').capitalize()}: `tokenspeed.{kind}` [api{each.api}]\n\n{text}\n"
        names = ", ".join(f"`{name}`" for name in each.built_in)
        built_in = f" Built in, and not to be taken: {names}." if names else ""
        new = f" Made by `tokenspeed plugins new {made[kind]} NAME`." if kind in made else ""
        yield f"Chosen by: {chosen}.{built_in}{new}\n"
        for each in value if isinstance(value, tuple) else (value,) if value is not None else ():
            yield from described(each)


def unused() -> Iterator[str]:
    """Yield the section of kinds whose names are kept, and which have no effect."""
    names = [f"`{kind}`" for kind, each in KINDS.items() if not each.is_used and not kind.startswith(KERNELS_PREFIX)]
    yield f"""## Kinds that nothing uses yet

{", ".join(names)}. `tokenspeed plugins list` calls such an entry unused, and `tokenspeed plugins new` writes none: a
package without effect would be worse than none.
"""


def hooks() -> Iterator[str]:
    """Yield the hooks and their records."""
    yield "## The hooks\n\nNone is called per token, and none on a step's way to the device.\n"
    for name, value in vars(hookspecs).items():
        if hasattr(value, "tokenspeed_spec"):
            yield f"- `{name}{inspect.signature(value)}`".replace("'", "") + f": {one_line(value)}"
    yield ""
    yield from described(hookspecs.RequestRecord)
    yield from described(hookspecs.StepRecord)


def kit() -> Iterator[str]:
    """Yield what each suite of the conformance kit asks."""
    yield """## The conformance kit

A class to inherit for each: set what it names, and its questions are tests of pytest's, or of any runner that takes
`test_` methods. `tokenspeed plugins check DIST` asks them of an installed distribution in a process of its own: a
verdict a line, or all with `--json`. Where this machine has no device for a question, it is skipped with the reason.
The last line then counts the cells that were not run and names what they need (`not_run` in the JSON, where
`is_complete` is false). The exit status is 0 where nothing that was run failed, 1 where something did or the process
died, and 2 for a distribution that is not there.
"""
    for suite in SUITES:
        yield f"### `{suite.__module__}.{suite.__name__}`\n\n{one_line(suite)}\n"
        for name, value in vars(suite).items():
            if name.startswith("test_"):
                yield f"- *{name.removeprefix('test_').replace('_', ' ')}*: {one_line(value)}"
        yield ""


def matrix(catalog: Catalog) -> Iterator[str]:
    """Yield what the kernels that everybody has say that they compute."""
    yield "## What the usual kernels declare\n\nThose of other plugins are in their READMEs.\n"
    yield "| op | backend | from | devices | types | more |\n|---|---|---|---|---|---|"
    yield from sorted(row(kernel.spec, kernel.distribution) for kernel in installed_kernels(catalog))


def row(spec: KernelSpec, distribution: str) -> str:
    """Return a spec's line of the matrix."""
    can = spec.capability
    low, high = (v and ".".join(map(str, v)) for v in (can.min_compute_capability, can.max_compute_capability))
    bounds = f" {low or ''}–{high or ''}" if low or high else ""
    more = [*sorted(can.features)]
    more += [f"heads of {', '.join(map(str, can.head_sizes))}"] if can.head_sizes else []
    more += [f"blocks of {', '.join(map(str, can.block_sizes))}"] if can.block_sizes else []
    more += list(can.phases)
    more += [bound(each) for each in can.limits]
    types = ", ".join(can.dtypes) + (f"; cache {', '.join(can.kv_dtypes)}" if can.kv_dtypes else "")
    devices = ", ".join(can.platforms) + bounds
    return f"| {spec.op} | {spec.backend} | {distribution} | {devices} | {types} | {'; '.join(more)} |"


def bound(limit: api.AxisLimit) -> str:
    """Return a limit as people read it."""
    steps = f" by {limit.multiple_of}" if limit.multiple_of > 1 else ""
    return f"{limit.axis} {limit.minimum}–{limit.maximum or ''}{steps}"


def described(value: Any) -> Iterator[str]:
    """Yield a class: its docstring, and its fields or methods."""
    yield f"### `{value.__name__}`\n\n{inspect.cleandoc(value.__doc__ or '')}\n"
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        has_default = field.default is not dataclasses.MISSING
        default = f" = {field.default!r}" if has_default and field.default.__class__.__module__ == "builtins" else ""
        yield f"- `{field.name}: {field.type}{default}`"
    if not dataclasses.is_dataclass(value):
        for name, each in vars(value).items():
            if not name.startswith("_") and inspect.isfunction(each):
                yield f"- `{name}{inspect.signature(each)}`".replace("'", "") + f": {one_line(each)}"
    yield ""


def one_line(value: Any) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join(inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    (FOLDER / "plugins.md").write_text(page(), encoding="utf-8")
