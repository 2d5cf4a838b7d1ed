"""The flags of all settings, as parameters of a typer command and as help by section."""

from __future__ import annotations

import inspect
import os
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from tokenspeed_core.config.describe import as_written, bounds
from tokenspeed_core.config.flag_aliases import ACCEPTED, ACCEPTED_WITH_VALUE
from tokenspeed_core.config.schema import C, Config
from tokenspeed_core.config.settings import flag
from tokenspeed_core.config.sources import load
from tokenspeed_core.errors import ConfigError

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help="Same as --model.")]
ConfigFile = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="Read settings from a YAML file.")
]

# A command's usage, description and own options.
Overview = tuple[str, str, tuple[tuple[str, str], ...]]
# Replaces the dot of `--attention-backend.decode` in a Python name.
DOT = "__"


def configure(kind: type[C], positional: str | None, flags: dict[str, Any], file: str | None) -> C:
    """Return the configuration of a command line. Raises ConfigError."""
    if positional is not None:
        if flags.get("model", positional) != positional:
            raise ConfigError(
                f"--model {flags['model']}: the model was already given as {positional}; give it once"
            )
        flags = {**flags, "model": positional}
    return load(kind, flags, os.environ, file)


class SettingsCommand:
    """A command that takes the flags of all settings. Used as an entry point of kind `commands`.

    `load` imports and returns the function to run. It takes `flags` and its own parameters. `config` declares the
    settings: `Config`, or a subclass with settings of the command.
    """

    def __init__(
        self,
        overview: Overview,
        load: Callable[[], Callable[..., int]],
        config: type[Config] = Config,
    ) -> None:
        self.config = config
        self._overview = overview
        self._load = load

    def __call__(self, words: Sequence[str]) -> int:
        """Run the command with these arguments; return the exit status."""
        topic = help_topic(words)
        if topic is not None:
            print_help(self.config, self._overview, topic)
            return 0
        app = typer.Typer(
            rich_markup_mode=None,
            add_completion=False,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": []},
        )
        app.command()(self.function())
        name = " ".join(self._overview[0].split()[:2])
        status = app(list(words), prog_name=name, standalone_mode=False)
        return status if isinstance(status, int) else 0

    def function(self) -> Callable[..., int]:
        """Return the function with the flags as parameters."""
        return with_settings(self.config, self._load())


def config_of(command: str) -> type[Config]:
    """Return the class that declares the settings of an installed command; `Config` if it is not installed."""
    from tokenspeed_core.plugins import Catalog

    catalog = Catalog.discover(check=False)
    if not catalog.is_installed("commands", command):
        return Config
    return catalog.need(catalog.get("commands", command), SettingsCommand).config


def with_settings(kind: type[Config], function: Callable[..., int]) -> Callable[..., int]:
    """Add the flags of all settings to a command.

    The function is called with its own parameters and `flags`, a dictionary of the values that were
    given. Its keys are `setting` or `setting.key`.
    """
    own = [
        p
        for p in inspect.signature(function, eval_str=True).parameters.values()
        if p.name != "flags"
    ]
    names = {p.name for p in own}
    settings = {each.name: each for each in _parameters(kind) if each.name not in names}

    def command(**given: Any) -> int:
        flags = {}
        for parameter in settings:
            value = given.pop(parameter)
            if value in (None, []):
                continue
            name = parameter.replace(DOT, ".")
            if isinstance(value, str) and value.startswith("--"):
                raise ConfigError(f"{flag(name)}: expected a value, found {value}")
            flags[name] = value
        return function(**given, flags=flags)

    parameters = [*own, *settings.values()]
    command.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = function.__doc__
    return command


def _parameters(kind: type[Config]) -> Iterable[inspect.Parameter]:
    for name, field in kind.model_fields.items():
        if kind.is_switch(name):
            form = (
                f"{flag(name)}/--no-{flag(name)[2:]}" if name.startswith("enable_") else flag(name)
            )
            yield _parameter(name, bool, form, text=field.description)
            continue
        # A flag that takes NAME=VALUE may be repeated.
        takes = list[str] if "=" in str(kind.metadata(name)["takes"]) else str
        yield _parameter(name, takes, *kind.flags_of(name), text=field.description)
        for key in kind.metadata(name)["narrow"]:
            yield _parameter(
                f"{name}{DOT}{key}", str, f"{flag(name)}.{key}", text=f"{flag(name)} for {key}"
            )

    # Flags of other engines that may stay in a command line.
    for name, why in ACCEPTED.items():
        yield _parameter(name, bool, flag(name), text=why, is_hidden=True)
    for name, why in ACCEPTED_WITH_VALUE.items():
        yield _parameter(name, str, flag(name), text=why, is_hidden=True)


def _parameter(
    name: str, takes: Any, *forms: str, text: str | None, is_hidden: bool = False
) -> inspect.Parameter:
    """Return the parameter of one setting, with all forms of its flag."""
    option = Annotated[
        takes | None, typer.Option(*forms, help=text, show_default=False, hidden=is_hidden)
    ]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)


def print_help(kind: type[Config], command: Overview, topic: str) -> None:
    """Print the sections, or the options of a section, of a flag, or that mention a word.

    Raises ConfigError if there are none.
    """
    if not topic:
        typer.echo(_overview(kind, command))
        return
    names = _settings_about(kind, topic)
    if not names:
        near = get_close_matches(topic, [*kind.sections, *kind.model_fields], n=1)
        hint = (
            f"did you mean --help={near[0]}?" if near else "sections: " + ", ".join(kind.sections)
        )
        raise ConfigError(f"--help={topic}: no such section or flag; {hint}")
    width = shutil.get_terminal_size((80, 24)).columns
    typer.echo("\n".join(line for name in names for line in _option(kind, name, width)))


def help_topic(words: Sequence[str]) -> str | None:
    """Return the topic of `--help=TOPIC`, "" for plain `--help`, None without it."""
    for word in words:
        if word == "--":
            return None
        if word in ("--help", "-h"):
            return ""
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def _overview(kind: type[Config], command: Overview) -> str:
    usage, text, own = command
    width = shutil.get_terminal_size((80, 24)).columns
    lines = [f"Usage: {usage}", "", *textwrap.wrap(text, width), ""]
    for form, meaning in (
        *own,
        ("--help=SECTION", "Show the options of a section, those that match a word, or all."),
    ):
        lines += textwrap.wrap(
            f"  {form:<22} {meaning}", width, subsequent_indent=" " * 25, break_long_words=False
        )
    lines += ["", "Sections:"]
    for section, title in kind.sections.items():
        names = [flag(name) for name in kind.names_in(section)]
        wrapper = textwrap.TextWrapper(
            max(1, width - 17), break_long_words=False, break_on_hyphens=False
        )
        lines += [
            f"  {section:<15}{title}",
            *(" " * 17 + line for line in wrapper.wrap(" ".join(names))),
        ]
    return "\n".join(lines)


def _settings_about(kind: type[Config], topic: str) -> list[str]:
    name = kind.full_name(topic.lstrip("-").replace("-", "_").lower())
    if name == "all":
        return kind.setting_names()
    if name in kind.sections:
        return kind.names_in(name)
    if name in kind.model_fields:
        return [name]
    texts = {
        each: str(kind.model_fields[each].description).lower() for each in kind.setting_names()
    }
    return [each for each, text in texts.items() if name in each or topic.lower() in text]


def _option(kind: type[Config], name: str, width: int) -> list[str]:
    field = kind.model_fields[name]
    form = ", ".join(kind.flags_of(name))
    if kind.is_switch(name):
        form += f", --no-{flag(name)[2:]}" if name.startswith("enable_") else ""
    else:
        form += f" {bounds(kind, name)}"
    lines = [f"  {form}"]
    if kind.metadata(name)["narrow"]:
        lines += textwrap.wrap(
            f"  {kind.narrowed(name)}", width, subsequent_indent="  ", break_on_hyphens=False
        )
    text = str(field.description).removesuffix(".")
    if field.default is not None and "default:" not in text:
        text += f"; default: {as_written(field.default)}"
    installed = _installed(kind.metadata(name)["kind"])
    if installed:
        text += f"; installed: {', '.join(installed)}"
    return lines + textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _installed(kind: str | None) -> tuple[str, ...]:
    """Return the names of the installed plugins of a kind."""
    from tokenspeed_core.plugins import Catalog

    return Catalog.discover(check=False).names(kind) if kind else ()
