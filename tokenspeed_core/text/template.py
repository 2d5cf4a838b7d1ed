"""Chat templates, rendered in a sandbox.

Limits of time and size are checked whenever the template outputs text. A loop without output is stopped
only from outside: the server renders templates in a subprocess.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenspeed_core.errors import CheckpointError, TokenSpeedError
from tokenspeed_core.files import read_json, read_text
from tokenspeed_core.text.user_text import UserTextGuard

if TYPE_CHECKING:
    from tokenspeed_core.text.tokenizer import Tokenizer

MAX_RENDER_SECONDS = 5.0
MAX_SOURCE_CHARS = 1024 * 1024
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


@jinja2.pass_context
def _unchanged(context: jinja2.runtime.Context, value: Any) -> Any:
    return value


def _environment() -> ImmutableSandboxedEnvironment:
    # Nothing is computed when a template is compiled, where no limit of time or memory holds: without
    # the optimizer, and with a function that depends on the context, jinja2 folds no constants.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
        optimized=False,
        finalize=_unchanged,
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _parse(environment: jinja2.Environment, text: str) -> nodes.Template:
    """Parse a template. Raises TemplateSyntaxError."""
    tree = environment.parse(text)
    escape = tree.find(nodes.EvalContextModifier)  # or one with a scope, a subclass
    if escape is not None:  # its option is computed when the template is compiled
        raise jinja2.TemplateSyntaxError("autoescape is not supported", escape.lineno)
    return tree


def _variables(tree: nodes.Template) -> set[str]:
    """Return the variables that a template reads, as jinja2's function does, but without its optimizer."""
    assert tree.environment is not None
    generator = jinja2.meta.TrackingCodeGenerator(tree.environment)
    generator.optimizer = None
    generator.visit(tree)
    return generator.undeclared_identifiers


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
        if sum(map(len, sources)) > MAX_SOURCE_CHARS:
            raise TemplateError(f"{origin} has more than {MAX_SOURCE_CHARS} characters")
        try:
            parsed = [_parse(environment, text) for text in sources]
            read = [_variables(tree) for tree in parsed]
            self._templates = [environment.from_string(text) for text in sources]
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{origin}, line {error.lineno}: {error.message}") from error
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise TemplateError(f"{origin} is nested too deeply: {error}") from error
        self._special_tokens = dict(special_tokens)
        fixed = _RESERVED | set(self._special_tokens) | set(environment.globals)
        self.options = frozenset().union(*read) - fixed
        self.knows_developer = any("developer" in text for text in sources)
        self._sources = "\n".join(sources)
        self._definition = {
            "source": source,
            "special_tokens": dict(special_tokens),
            "with_tools": with_tools,
            "origin": origin,
        }
        self._guard: UserTextGuard | None = None

    def definition(self) -> dict[str, Any]:
        """Return the arguments that make an equal template, as plain data."""
        return dict(self._definition)

    def guard(self, tokenizer: Tokenizer) -> UserTextGuard:
        """Return the guard against control tokens in texts of users."""
        if self._guard is None:
            self._guard = tokenizer.user_text_guard(self._sources)
        return self._guard

    def mentions(self, key: str) -> bool:
        """Say whether the source names a key, as in `message.key` or `message["key"]`."""
        return re.search(rf"[.'\"]{re.escape(key)}\b", self._sources) is not None

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
    sources = read_chat_templates(folder, chosen)
    if not sources:
        return None
    try:
        return ChatTemplate(
            sources[0],
            special_tokens,
            with_tools=sources[1] if len(sources) > 1 else None,
            origin=chosen or str(folder),
        )
    except TemplateError as error:
        raise CheckpointError(f"bad chat template: {error}") from error


def read_chat_templates(folder: Path, chosen: str | None = None) -> Sequence[str]:
    """Return the source of the model's chat template, then that for requests with tools if it differs.

    `chosen` is a file or a name. Raises CheckpointError if a file is missing or invalid.
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
    if chosen is not None:
        return (named[chosen],)
    if "default" not in named:
        if named:
            raise CheckpointError(
                f"{folder} has no default chat template; choose one with --chat-template: {names}"
            )
        return ()
    return tuple(named[name] for name in ("default", "tool_use") if name in named)


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
