"""Write docs/plugins.md: a section for each kind, of what the code says of it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import make_contract as contract
from plugin_kinds import ABOUT, KERNELS, LISTED, About
from tokenspeed_plugin_tools.new import RECIPES
from tokenspeed_testing.distribution import DistributionConformance, core_range
from tokenspeed_testing.kernel import KernelConformance
from tokenspeed_testing.model import ModelConformance
from tokenspeed_testing.parser import ParserConformance
from tokenspeed_testing.policy import PolicyConformance

import tokenspeed_core
from tokenspeed_core import api, testing
from tokenspeed_core.api import hooks as hookspecs
from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.commands import COMMANDS_API
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.deprecations import DEPRECATED
from tokenspeed_core.plugins.kinds import KERNELS_PREFIX, KINDS
from tokenspeed_core.plugins.selection import Selection
from tokenspeed_models import layers as model_layers

FOLDER = Path(__file__).parents[2] / "docs"
HEAD = FOLDER / "plugins.head.md"
SUITES = (
    DistributionConformance,
    KernelConformance,
    ModelConformance,
    ParserConformance,
    PolicyConformance,
)


def page() -> str:
    """Return the page."""
    ours = Catalog.discover(Selection(frozenset()), check=False)
    filled = {
        "CORE_RANGE": core_range(),
        "API_NOW": api.API_VERSION,
        "DEPRECATIONS": deprecations(),
    }
    head = HEAD.read_text(encoding="utf-8")
    for word, text in filled.items():
        head = head.replace(word, text)
    told_of = [*kernels(ours), *kinds(), *unused(), *hooks()]
    sections = [*told_of, *commands(), *layers(), *kit(), *programs(), *matrix(ours)]
    return "\n".join([head, *overview(), *sections]).rstrip() + "\n"


def overview() -> Iterator[str]:
    """Yield the table of kinds, each with where it is told of."""
    yield "## The kinds\n\n| kind | what it is for | chosen by | a package of it |\n|---|---|---|---|"
    every = {"kernels.FAMILY": KERNELS, **{kind: ABOUT[kind] for kind in used()}}
    for kind, about in every.items():
        family = "|".join(
            name for name, recipe in RECIPES.items() if recipe.group.startswith(KERNELS_PREFIX)
        )
        name = family if kind == "kernels.FAMILY" else made(kind)
        new = f"`plugins new {name} NAME`".replace("|", "\\|") if name else ""
        purpose = about.purpose.partition(". ")[0].rstrip(".") + "."
        yield f"| [{kind}](#{slug(title(kind))}) | {purpose} | {about.chosen} | {new} |"
    yield ""


def used() -> list[str]:
    """Return the kinds that this core uses, but for kernels."""
    return [
        kind for kind, each in KINDS.items() if each.is_used and not kind.startswith(KERNELS_PREFIX)
    ]


def made(kind: str) -> str:
    """Return what `plugins new` calls a kind, "" where it makes none."""
    return next((name for name, recipe in RECIPES.items() if recipe.group == kind), "")


def title(kind: str) -> str:
    """Return the heading of a kind's section."""
    name = "Kernels" if kind.startswith(KERNELS_PREFIX) else kind.replace("_", " ").capitalize()
    api_number = KINDS["kernels.attention" if kind.startswith(KERNELS_PREFIX) else kind].api
    return f"{name}: `tokenspeed.{kind}` [api{api_number}]"


def slug(heading: str) -> str:
    """Return what a link to a heading says, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def deprecations() -> str:
    """Return what is deprecated now, for the page's head."""
    rows = [f"\n- `{old}` {each}" for old, each in DEPRECATED.items()]
    return "Deprecated now:\n" + "".join(rows) if rows else "Nothing is deprecated today."


def kernels(catalog: Catalog) -> Iterator[str]:
    """Yield the section of kernels, with every op that has a contract."""
    yield f"## {title('kernels.FAMILY')}\n\n{KERNELS.purpose} Chosen by {KERNELS.chosen}.\n"
    yield from subjects(KERNELS)
    yield """### The ops

What `load` builds is called as the signature says. The family is in the group's name. These are the ops that every
installation has; plugins bring more, such as those of block-scaled operands and of latent attention:
`tokenspeed plugins list --ops` names all that are installed, with who brings and who computes each, and
`tokenspeed plugins info DIST` has the contracts of what a distribution brings, as below (`--json`: whole).
"""
    for op in sorted(installed_ops(catalog).values(), key=lambda op: (op.family, op.name)):
        axes = "; ".join(f"`{axis}` {meaning}" for axis, meaning in op.axes.items())
        worst = ", ".join(f"{t.dtype} {t.absolute:g} + {t.relative:g} |ref|" for t in op.tolerances)
        notes = [f"in place: {', '.join(op.mutates)}"] if op.mutates else []
        notes += [f"fused of {' + '.join(op.parts)}"] if op.parts else []
        yield (
            f"- **`{op.name}`** ({op.family}): `{op.signature}`  \n  axes: {axes}  \n  tolerance: {worst}"
            + ("  \n  " + "; ".join(notes) if notes else "")
        )
    yield ""


def kinds() -> Iterator[str]:
    """Yield a section for each other kind that is used."""
    for kind in used():
        about = ABOUT[kind]
        names = ", ".join(f"`{name}`" for name in KINDS[kind].built_in)
        built_in = f" Built in, and not to be taken: {names}." if names else ""
        new = f" Made by `tokenspeed plugins new {made(kind)} NAME`." if made(kind) else ""
        yield f"## {title(kind)}\n\n{about.purpose}\n\nChosen by: {about.chosen}.{built_in}{new}\n"
        yield from subjects(about)


def subjects(about: About) -> Iterator[str]:
    """Yield what the author of a kind writes and is given, subject by subject."""
    for sentence, classes in about.subjects.items():
        yield f"{sentence}\n"
        for each in classes:
            yield from described(each)
    for name, meaning in about.words.items():
        yield f"- **`{name}`**: {meaning}"
    if about.words:
        yield ""


def unused() -> Iterator[str]:
    """Yield the section of kinds whose names are kept, and which have no effect."""
    names = [
        f"`{kind}`"
        for kind, each in KINDS.items()
        if not each.is_used and not kind.startswith(KERNELS_PREFIX)
    ]
    yield f"""## Kinds that nothing uses yet

{", ".join(names)}. `tokenspeed plugins list` calls such an entry unused, and `tokenspeed plugins new` writes none: a
package without effect would be worse than none.
"""


def hooks() -> Iterator[str]:
    """Yield the hooks and their records."""
    yield "## The hooks\n\nNone is called per token, and none on a step's way to the device.\n"
    for name, value in vars(hookspecs).items():
        if hasattr(value, "tokenspeed_spec"):
            yield f"- `{signature_of(name, value)}`: {one_line(value)}"
    yield ""
    yield from described(hookspecs.RequestRecord)
    yield from described(hookspecs.StepRecord)


def commands() -> Iterator[str]:
    """Yield what a command may import of the core besides the api."""
    yield f"""## For commands: `tokenspeed_core.commands`

Provisional, `COMMANDS_API` {COMMANDS_API}. Its parts are apart so that a command which needs less is quicker to start.
"""
    for name in contract.modules("tokenspeed_core.commands"):
        module = import_module(name)
        listed = [each for each in module.__all__ if not each.endswith("_API")]
        yield from told(name, module, listed)


def layers() -> Iterator[str]:
    """Yield what a model family may build on besides the api."""
    yield f"""## For models: `tokenspeed_models`

Provisional, `LAYERS_API` {model_layers.LAYERS_API}. What decoders share, from reading their configuration to their
tests; a family may do without.
"""
    listed = [each for each in model_layers.__all__ if not each.endswith("_API")]
    yield from told(model_layers.__name__, model_layers, listed)
    for module in map(import_module, contract.LAYERS_BESIDE):
        yield from told(module.__name__, module, contract.defined(Path(module.__file__ or "")))


def programs() -> Iterator[str]:
    """Yield what a program may import of `tokenspeed_core` itself."""
    yield "## For programs: `tokenspeed_core`\n\nStable. Models without a server; README shows it in use.\n"
    for name in tokenspeed_core.__all__:
        yield from described(getattr(tokenspeed_core, name))


def told(name: str, module: Any, names: Iterable[str]) -> Iterator[str]:
    """Yield a line for each of a module's names, and one for the constants of which nothing is said."""
    yield f"### `{name}`\n\n{one_line(module)}\n"
    bare = []
    for each in names:
        value = getattr(module, each)
        if inspect.isfunction(value):
            yield f"- **`{signature_of(each, value)}`**: {one_line(value)}"
        elif (
            text := one_line(value)
            if inspect.isclass(value)
            else LISTED.get(each) or comment(module, each)
        ):
            yield f"- **`{each}`**: {text}"
        else:
            bare.append(f"**`{each}`**")
    if bare:
        yield f"- constants: {', '.join(bare)}"
    yield ""


def kit() -> Iterator[str]:
    """Yield what each suite of the conformance kit asks."""
    yield """## The conformance kit

A class to inherit for each: set what it names, and its questions are tests of pytest's, or of any runner that takes
`test_` methods. `tokenspeed plugins check DIST` asks them of an installed distribution in a process of its own: a
verdict a line, or all with `--json`. Where this machine has no device for a question, it is skipped with the reason.
The last line then counts the cells that were not run and names what they need (`not_run` in the JSON, where
`is_complete` is false). A family is built from `example/config.json` in its package, or of several families from
`example/NAME/config.json` of each; one without is counted there, with what to add. The exit status is 0 where nothing
that was run failed, 1 where something did or the process died, and 2 for a distribution that is not there.
"""
    for suite in SUITES:
        yield f"### `{suite.__module__}.{suite.__name__}`\n\n{one_line(suite)}\n"
        for name, value in vars(suite).items():
            if name.startswith("test_"):
                text = " ".join(inspect.cleandoc(value.__doc__ or "").split())
                yield f"- *{name.removeprefix('test_').replace('_', ' ')}*: {text}"
        yield ""
    yield f"What the suites are made of is for tests of your own. Provisional, `TESTING_API` {testing.TESTING_API}.\n"
    suites = {suite.__name__ for suite in SUITES}
    for module in map(import_module, contract.modules(testing.__name__)):
        names = [
            name for name in contract.defined(Path(module.__file__ or "")) if name not in suites
        ]
        if names:
            yield from told(module.__name__, module, names)


def matrix(catalog: Catalog) -> Iterator[str]:
    """Yield what the kernels that everybody has say that they compute."""
    yield "## What the usual kernels declare\n\nThose of other plugins are in their READMEs.\n"
    yield "| op | backend | from | devices | types | more |\n|---|---|---|---|---|---|"
    yield from sorted(
        row(kernel.spec, kernel.distribution) for kernel in installed_kernels(catalog)
    )


def row(spec: KernelSpec, distribution: str) -> str:
    """Return a spec's line of the matrix."""
    can = spec.capability
    low, high = (
        v and ".".join(map(str, v))
        for v in (can.min_compute_capability, can.max_compute_capability)
    )
    bounds = f" {low or ''}–{high or ''}" if low or high else ""
    more = [*sorted(can.features)]
    more += [f"heads of {', '.join(map(str, can.head_sizes))}"] if can.head_sizes else []
    more += [f"blocks of {', '.join(map(str, can.block_sizes))}"] if can.block_sizes else []
    more += list(can.phases)
    more += [bound(each) for each in can.limits]
    types = ", ".join(can.dtypes) + (f"; cache {', '.join(can.kv_dtypes)}" if can.kv_dtypes else "")
    devices = ", ".join(can.platforms) + bounds
    return (
        f"| {spec.op} | {spec.backend} | {distribution} | {devices} | {types} | {'; '.join(more)} |"
    )


def bound(limit: api.AxisLimit) -> str:
    """Return a limit as people read it."""
    steps = f" by {limit.multiple_of}" if limit.multiple_of > 1 else ""
    return f"{limit.axis} {limit.minimum}–{limit.maximum or ''}{steps}"


def described(value: Any) -> Iterator[str]:
    """Yield a class: its docstring, and its fields, attributes and methods."""
    text = re.sub(
        r"^(>>>|\.\.\.)", r"    \1", inspect.cleandoc(value.__doc__ or ""), flags=re.MULTILINE
    )
    yield f"### `{value.__name__}`\n\n{text}\n"
    fields = (
        {each.name: each for each in dataclasses.fields(value)}
        if dataclasses.is_dataclass(value)
        else {}
    )
    said = comments(value)
    for name, text in vars(value).get("__annotations__", {}).items():
        if not name.startswith("_") and name != "model_config":
            default = default_of(fields[name]) if name in fields else ""
            yield f"- `{name}: {text}{default}`" + (f": {said[name]}" if name in said else "")
    for name, each in vars(value).items():
        is_called = name == "__call__" or (name == "__init__" and each.__doc__ and not fields)
        if isinstance(each, property) and not name.startswith("_"):
            yield f"- `{name}` (property): {one_line(each)}"
        elif inspect.isfunction(each) and (is_called or not name.startswith("_")):
            yield f"- `{signature_of(name, each)}`: {' '.join(inspect.cleandoc(each.__doc__ or '').split())}"
    yield ""


class Written(str):
    """A text that stands in a signature as it is, without quotes."""

    def __repr__(self) -> str:
        """Return the text."""
        return str(self)


def signature_of(name: str, function: Any) -> str:
    """Return a function's name and signature as its source has them; long defaults are left out."""
    signature = inspect.signature(function)
    parameters = [
        each.replace(
            annotation=each.annotation
            if each.annotation is each.empty
            else Written(each.annotation),
            default=Written("...")
            if len(repr(each.default)) > 40 and each.default is not each.empty
            else each.default,
        )
        for each in signature.parameters.values()
    ]
    return f"{name}{signature.replace(parameters=parameters, return_annotation=Written(signature.return_annotation))}"


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as it is written, "" where it has none that reads as itself."""
    has_default = (
        field.default is not dataclasses.MISSING and type(field.default).__module__ == "builtins"
    )
    return f" = {field.default!r}" if has_default else ""


def comments(value: type) -> dict[str, str]:
    """Return the comments that stand beside a class's fields: units, shapes and meanings."""
    return dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(value), re.MULTILINE))


def comment(module: Any, name: str) -> str:
    """Return the comment beside a module's constant."""
    found = re.search(rf"^{name}\b.*?  # (.+)$", inspect.getsource(module), re.MULTILINE)
    return found[1] if found else ""


def one_line(value: Any) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join(inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    (FOLDER / "plugins.md").write_text(page(), encoding="utf-8")
