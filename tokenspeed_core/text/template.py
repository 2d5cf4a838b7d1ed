"""Chat templates, rendered in a sandbox.

Limits of time and size are checked whenever the template outputs text. A loop without output is not
stopped, so trust a template as you trust its checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenspeed_core.errors import CheckpointError, TokenSpeedError
from tokenspeed_core.files import read_json, read_text

MAX_RENDER_SECONDS = 5.0
MAX_RENDER_CHARS = 64 * 1024 * 1024

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class TemplateError(TokenSpeedError):
    """A chat template rejects the messages, fails on them, or exceeds its limits."""


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}` blocks, which mark the assistant's text for training. They have no effect."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the content of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class ChatTemplate:
    """The compiled chat template of a model. Thread-safe."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        with_tools: str | None = None,
        origin: str = "the chat template",
    ) -> None:
        """`with_tools` is the source for requests with tools, if it differs. Raises TemplateError on bad syntax."""
        environment = _environment()
        sources = (source,) if with_tools is None else (source, with_tools)
        try:
            self._templates = [environment.from_string(text) for text in sources]
            read = [
                jinja2.meta.find_undeclared_variables(environment.parse(text)) for text in sources
            ]
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{origin}, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        fixed = _RESERVED | set(self._special_tokens) | set(environment.globals)
        self.options = frozenset().union(*read) - fixed
        self.knows_developer = any("developer" in text for text in sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of the prompt. Raises TemplateError, which includes a message that the template raised."""
        options = options or {}
        unknown = sorted(set(options) - self.options)
        if unknown:
            read = ", ".join(sorted(self.options)) or "none"
            raise TemplateError(
                f"this model's chat template has no variable {unknown[0]!r}; available: {read}"
            )
        template = self._templates[-1] if tools else self._templates[0]
        values = {
            **self._special_tokens,
            **options,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        deadline = time.monotonic() + MAX_RENDER_SECONDS
        parts, num_chars = [], 0
        try:
            for part in template.generate(values):
                parts.append(part)
                num_chars += len(part)
                if num_chars > MAX_RENDER_CHARS or time.monotonic() > deadline:
                    raise TemplateError(
                        f"the chat template did not end after {num_chars} characters; the limits "
                        f"are {MAX_RENDER_CHARS} characters and {MAX_RENDER_SECONDS:.0f} s"
                    )
        except jinja2.exceptions.TemplateError as error:
            raise TemplateError(f"the chat template rejects the messages: {error}") from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            # The template is part of the checkpoint. Report its errors as errors of the request.
            raise TemplateError(f"the chat template fails on the messages: {error}") from error
        return "".join(parts)


def load_chat_template(
    folder: Path, special_tokens: Mapping[str, str], chosen: str | None = None
) -> ChatTemplate | None:
    """Load the model's chat template, or the `chosen` file or name. Return None if the model has none.

    Raises CheckpointError if a file is missing or invalid.
    """
    named = _named_templates(folder)
    names = ", ".join(sorted(named)) or "none"
    if chosen is not None and chosen not in named:
        file = Path(chosen)
        if not file.is_file():
            raise CheckpointError(
                f"--chat-template {chosen}: no such file, and no template of that name in {folder}; "
                f"available: {names}"
            )
        named = {chosen: read_text(file)}
    if chosen is None and "default" not in named:
        if named:
            raise CheckpointError(
                f"{folder} has no default chat template; choose one with --chat-template: {names}"
            )
        return None
    source = named[chosen or "default"]
    try:
        return ChatTemplate(
            source,
            special_tokens,
            with_tools=named.get("tool_use") if chosen is None else None,
            origin=chosen or str(folder),
        )
    except TemplateError as error:
        raise CheckpointError(f"bad chat template: {error}") from error


def _named_templates(folder: Path) -> dict[str, str]:
    """Return the templates of a checkpoint by name. Raises CheckpointError.

    chat_template.jinja overrides the default in tokenizer_config.json.
    """
    named: dict[str, str] = {}
    config = folder / "tokenizer_config.json"
    entry = read_json(config).get("chat_template") if config.is_file() else None
    if isinstance(entry, str):
        named["default"] = entry
    elif isinstance(entry, list):
        for item in entry:
            match item:
                case {"name": str(name), "template": str(template)}:
                    named[name] = template
                case _:
                    raise CheckpointError(
                        f"{config}: every entry of chat_template needs a name and a template"
                    )
    file = folder / "chat_template.jinja"
    if file.is_file():
        named["default"] = read_text(file)
    return named
