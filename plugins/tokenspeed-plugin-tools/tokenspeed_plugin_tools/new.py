"""`tokenspeed plugins new KIND NAME`: a package that installs, passes its tests and serves, as it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated

import typer
from tokenspeed_testing.distribution import core_range

from tokenspeed_core import TokenSpeedError, __version__
from tokenspeed_core.commands import KINDS, Catalog, Selection

_WORD = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*\Z")
_WITH_KERNELS = "tokenspeed-core[default]"  # a kernel alone serves nothing: the rest comes with it


class NewError(TokenSpeedError):
    """A package that cannot be written; the message says what to type instead."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a kind of package is made of.

    `group` is its entry points' group, `use` a line that uses it; both know the fields of `Names`. `sources` maps each
    file of the package, `test` its tests, to a template.
    """

    group: str
    summary: str
    use: str
    sources: Mapping[str, str]
    test: str = "common/test_kernel.py"
    requires: tuple[str, ...] = ()
    core: str = _WITH_KERNELS


def _kernel(folder: str) -> Mapping[str, str]:
    return {"__init__.py": f"{folder}/__init__.py", "kernel.py": f"{folder}/kernel.py"}


def _parser(folder: str) -> Mapping[str, str]:
    return {"__init__.py": f"{folder}/__init__.py", "parser.py": f"{folder}/parser.py"}


RECIPES: Mapping[str, Recipe] = {
    "attention": Recipe(
        "kernels.attention",
        "The attention backend $name for TokenSpeed.",
        "tokenspeed serve --attention-backend $name",
        _kernel("attention"),
        requires=("torch>=2.11",),
    ),
    "moe": Recipe(
        "kernels.moe",
        "The expert backend $name for TokenSpeed.",
        "tokenspeed serve $package/example --load-format dummy --skip-tokenizer-init --moe-backend $name,auto",
        {**_kernel("moe"), "example/config.json": "moe/config.json"},
        requires=("torch>=2.11",),
    ),
    "linear": Recipe(
        "kernels.linear",
        "The backend $name for TokenSpeed's matrix products.",
        "tokenspeed serve --kernel-backend linear=$name,auto",
        _kernel("linear"),
        requires=("torch>=2.11",),
    ),
    "sampling": Recipe(
        "kernels.sampling",
        "The sampling backend $name for TokenSpeed.",
        "tokenspeed serve --sampling-backend $name,auto",
        _kernel("sampling"),
        requires=("torch>=2.11",),
    ),
    "model": Recipe(
        "models",
        "The model family $name for TokenSpeed.",
        "tokenspeed serve $package/example --load-format dummy --skip-tokenizer-init",
        {
            "__init__.py": "model/__init__.py",
            "describe.py": "model/describe.py",
            "model.py": "model/model.py",
            "example/config.json": "model/config.json",
        },
        test="model/test.py",
        requires=("tokenspeed-models==$core_minor.*",),  # its layers are provisional
    ),
    "tool-parser": Recipe(
        "tool_parsers",
        "The tool-call parser $name for TokenSpeed.",
        "tokenspeed serve --tool-call-parser $name",
        _parser("tool_parser"),
        test="parser/test.py",
        core="tokenspeed-core",
    ),
    "reasoning-parser": Recipe(
        "reasoning_parsers",
        "The reasoning parser $name for TokenSpeed.",
        "tokenspeed serve --reasoning-parser $name",
        _parser("reasoning_parser"),
        test="parser/test.py",
        core="tokenspeed-core",
    ),
    "policy": Recipe(
        "policies",
        "The scheduling policy $name for TokenSpeed.",
        "tokenspeed serve --schedule-policy $name",
        {"__init__.py": "policy/__init__.py"},
        test="policy/test.py",
        requires=("numpy>=2.0",),
        core="tokenspeed-core",
    ),
    "command": Recipe(
        "commands",
        "The command tokenspeed $name.",
        "tokenspeed $name",
        {"__init__.py": "command/__init__.py"},
        test="command/test.py",
        core="tokenspeed-core",
    ),
}


def new(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"one of {', '.join(RECIPES)}")],
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="your own name, or VENDOR/NAME, such as acme/flash"),
    ],
    path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="where; by default ./DISTRIBUTION")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> int:
    """Write a package of a kind, and say what to do with it. Raises NewError; nothing is overwritten."""
    fields = fields_of(kind, name)
    distribution = fields["distribution"]
    folder = path or Path(distribution)
    _refuse_twin(kind, name, distribution, folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NewError(f"{folder} is there already; name another folder with --path")
    taken = find_spec(fields["package"])
    if taken is not None:
        raise NewError(
            f"a module {fields['package']} is there already, {taken.origin or 'of several folders'}; take "
            f"another name, or `pip uninstall {distribution}` first"
        )
    _refuse_what_is_claimed(kind, name, fields["name"])
    written = []
    try:
        for target, text in contents(kind, fields):
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            (folder / target).write_text(text, encoding="utf-8")
            written.append(target)
    except OSError as error:
        raise NewError(
            f"{folder} cannot be written: {error.strerror}; name another folder with --path"
        ) from error
    then = [
        f"cd {folder}",
        "pip install -e '.[test]'",
        "pytest",
        f"tokenspeed plugins check {distribution}",
        fields["use"],
    ]
    if as_json:
        facts = {"folder": str(folder), "distribution": distribution, "name": fields["name"]}
        typer.echo(json.dumps({**facts, "files": written, "then": then}, indent=2))
    else:
        typer.echo(
            "\n".join([f"wrote {folder}: {fields['summary']}", "", *(f"  {line}" for line in then)])
        )
    return 0


def fields_of(kind: str, name: str) -> dict[str, str]:
    """Return what the templates of a kind are filled with for a name. Raises NewError."""
    recipe = _recipe(kind)
    vendor, slash, own = name.partition("/")
    if not _WORD.match(vendor) or (slash and not _WORD.match(own)):
        raise NewError(
            f"the name {name!r} must be NAME or VENDOR/NAME, each a letter of a-z and then a-z, 0-9 and "
            "single '-' between them, as acme/flash"
        )
    if vendor == "tokenspeed":
        raise NewError("names of vendor tokenspeed are TokenSpeed's own; take yours")
    distribution = f"{vendor}-{own or kind}"
    package = distribution.replace("-", "_")
    entry, attribute = _entry(recipe, f"{vendor}/{own or kind}", package)
    minor = ".".join(__version__.split(".")[:2])
    requires = [
        core_range().replace("tokenspeed-core", recipe.core),
        *(Template(line).substitute(core_minor=minor) for line in recipe.requires),
    ]
    fields = {
        "distribution": distribution,
        "package": package,
        "name": entry,
        "attribute": attribute,
        "group": recipe.group,
        "api": str(KINDS[recipe.group].api),
        "core_version": __version__,
        "core_range": core_range(),
        "dependencies": ", ".join(f'"{line}"' for line in requires),
    }
    said = {what: Template(getattr(recipe, what)).substitute(fields) for what in ("summary", "use")}
    return {**fields, **said}


def _refuse_twin(kind: str, name: str, distribution: str, folder: Path) -> None:
    """Raise NewError where a package of the name stands beside: pip would have one of the two in the other's place."""
    for other in (Path(distribution), folder.with_name(distribution)):
        if (other / "pyproject.toml").exists():
            whole = name if "/" in name else f"{name}/{kind}"
            raise NewError(
                f"{other} is a package {distribution} already, and pip keeps one of a name; take another: "
                f"`tokenspeed plugins new {kind} {whole}-{kind if '/' in name else 2}`"
            )


def _refuse_what_is_claimed(kind: str, name: str, entry: str) -> None:
    """Raise NewError for an entry that an installed distribution, or the core, has: claimed twice, no start works."""
    group = RECIPES[kind].group
    claims = [
        each for each in Catalog.discover(Selection(), check=False).all() if each.kind == group
    ]
    owners = [f"{each.distribution} {each.version}" for each in claims if each.name == entry]
    owners += [f"tokenspeed-core {__version__}"] * (entry in KINDS[group].built_in)
    if owners:
        raise NewError(
            f"{group} {entry} is that of {owners[0]} already, and a name that is claimed twice stops "
            f"every start; put yours before it: `tokenspeed plugins new {kind} VENDOR/"
            f"{name.rpartition('/')[2]}`"
        )


def contents(kind: str, fields: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (path in the folder, text) of a package's files."""
    recipe, package = _recipe(kind), fields["package"]
    sources = {
        "pyproject.toml": "common/pyproject.toml",
        "README.md": "common/README.md",
        ".github/workflows/tests.yml": "common/ci.yml",
        **{f"{package}/{target}": source for target, source in recipe.sources.items()},
        f"tests/test_{package}.py": recipe.test,
    }
    for target, source in sources.items():
        template = files("tokenspeed_plugin_tools").joinpath(
            "templates", *f"{source}.template".split("/")
        )
        yield target, Template(template.read_text(encoding="utf-8")).substitute(fields)
    yield f"{package}/py.typed", ""


def _entry(recipe: Recipe, name: str, package: str) -> tuple[str, str]:
    """Return what users type for a package's entry, and the attribute that the entry points at."""
    camel = "".join(part.capitalize() for part in package.split("_"))
    if recipe.group == "models":  # named as config.json names it
        return f"{camel.removesuffix('Model')}ForCausalLM", package.upper()
    if recipe.group == "commands":  # a word of the command line
        return package.replace("_", "-"), "run"
    return name, camel if recipe.group == "policies" else package.upper()


def _recipe(kind: str) -> Recipe:
    if kind in RECIPES:
        return RECIPES[kind]
    near = get_close_matches(kind, RECIPES, n=1)
    meant = f"did you mean {near[0]}?" if near else f"there is {', '.join(RECIPES)}"
    raise NewError(f"plugins new {kind}: no such kind; {meant}")
