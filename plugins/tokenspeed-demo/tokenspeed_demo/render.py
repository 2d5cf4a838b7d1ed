"""The checkpoint's chat template, rendered as transformers and the server render it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenspeed_demo.items import Item

TEMPLATE = Path(__file__).resolve().parent / "checkpoint" / "chat_template.jinja"
END_OF_TURN = "<|im_end|>"


class Renderer:
    """Renders items to text with the template of a checkpoint."""

    def __init__(self, template: Path = TEMPLATE) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self._template = environment.from_string(template.read_text(encoding="utf-8"))

    def prompt(self, item: Item) -> str:
        """Everything before the assistant's turn, its opening included."""
        return self._template.render(
            messages=item.messages,
            tools=item.tools or None,
            add_generation_prompt=True,
            enable_thinking=item.enable_thinking,
        )

    def completion(self, item: Item) -> str:
        """The assistant's turn with the token that ends it."""
        return item.completion + END_OF_TURN
