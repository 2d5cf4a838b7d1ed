"""`tokenspeed plugins new`: write a plugin package that installs, passes its tests and serves."""

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
from tokenspeed_core.commands import Catalog, Kind, Selection, kind_of

_WORD = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*\Z")
# Kernels need the default distributions to serve a model.
_WITH_KERNELS = "tokenspeed-core[default]"


class NewError(TokenSpeedError):
    """A package that cannot be written."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The parts of a package of one kind.

    `group` is the entry points' group and `use` a command that uses the plugin. `sources` maps files of
    the package to templates; `test` is the template of its tests.
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
        "tokenspeed serve $package/example --load-format dummy --skip-tokenizer-init --moe-backend $name",
        {**_kernel("moe"), "example/config.json": "moe/config.json"},
        requires=("torch>=2.11",),
    ),
    "linear": Recipe(
        "kernels.linear",
        "The linear backend $name for TokenSpeed.",
        "tokenspeed serve --kernel-backend linear=$name,auto",
        _kernel("linear"),
        requires=("torch>=2.11",),
    ),
    "sampling": Recipe(
        "kernels.sampling",
        "The sampling backend $name for TokenSpeed.",
        "tokenspeed serve --sampling-backend $name",
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
        requires=("tokenspeed-models==$core_minor.*",),
    ),
    "quantization": Recipe(
        "quantization",
        "The quantization method $name for TokenSpeed.",
        "tokenspeed serve --quantization $name",
        {"__init__.py": "quantization/__init__.py"},
        test="quantization/test.py",
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
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(RECIPES)}.")],
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="NAME or VENDOR/NAME, such as acme/flash."),
    ],
    path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder to write; default: ./DISTRIBUTION."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Write a package and print the next steps. Overwrites nothing. Raises NewError."""
    fields = fields_of(kind, name)
    distribution = fields["distribution"]
    folder = path or Path(distribution)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NewError(f"{folder} already exists; choose another folder with --path")
    taken = find_spec(fields["package"])
    if taken is not None:
        raise NewError(
            f"a module {fields['package']} is already installed; choose another name, or run "
            f"`pip uninstall {distribution}` first"
        )
    _check_name_is_free(kind, name, fields["name"])
    written = []
    try:
        for target, text in contents(kind, fields):
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            (folder / target).write_text(text, encoding="utf-8")
            written.append(target)
    except OSError as error:
        raise NewError(
            f"{folder} cannot be written: {error.strerror}; choose another folder with --path"
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
    """Return the values of the placeholders in the templates. Raises NewError."""
    recipe = _recipe(kind)
    vendor, slash, own = name.partition("/")
    if not _WORD.match(vendor) or (slash and not _WORD.match(own)):
        raise NewError(
            f"invalid name {name!r}: use NAME or VENDOR/NAME with lower-case letters, digits and single "
            "hyphens, such as acme/flash"
        )
    if vendor == "tokenspeed":
        raise NewError("the vendor name tokenspeed is reserved; choose another")
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
        "api": str(_kind(recipe.group).api),
        "core_version": __version__,
        "core_range": core_range(),
        "dependencies": ", ".join(f'"{line}"' for line in requires),
    }
    fields["summary"] = Template(recipe.summary).substitute(fields)
    fields["use"] = Template(recipe.use).substitute(fields)
    return fields


def _check_name_is_free(kind: str, name: str, entry: str) -> None:
    """Raise NewError if an installed distribution uses the name: a conflict would stop every start."""
    group = RECIPES[kind].group
    owners = [
        f"{each.distribution} {each.version}"
        for each in Catalog.discover(Selection(), check=False).all()
        if each.kind == group and each.name == entry
    ]
    if entry in _kind(group).built_in:
        owners.append("tokenspeed-core")
    if owners:
        own = name.rpartition("/")[2]
        hint = (
            "choose another name, or uninstall it, since one distribution serves an architecture"
            if group == "models"
            else f"choose another name, such as `tokenspeed plugins new {kind} VENDOR/{own}`"
        )
        raise NewError(f"{group} {entry} is already used by {owners[0]}; {hint}")


def _kind(group: str) -> Kind:
    kind = kind_of(group)
    assert kind is not None
    return kind


def contents(kind: str, fields: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (path, text) for each file of a package."""
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
    """Return the name of the entry point and its attribute."""
    camel = "".join(part.capitalize() for part in package.split("_"))
    if recipe.group == "models":  # an architecture in config.json, which has no vendor
        vendor, _, own = name.partition("/")
        words = (vendor if own == "model" else own).split("-")
        return f"{''.join(word.capitalize() for word in words)}ForCausalLM", package.upper()
    if recipe.group == "commands":  # a command-line word
        return package.replace("_", "-"), "run"
    return name, camel if recipe.group == "policies" else package.upper()


def _recipe(kind: str) -> Recipe:
    if kind in RECIPES:
        return RECIPES[kind]
    near = get_close_matches(kind, RECIPES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"kinds: {', '.join(RECIPES)}"
    raise NewError(f"plugins new {kind}: no such kind; {hint}")
