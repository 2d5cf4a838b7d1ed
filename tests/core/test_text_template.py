"""Chat templates: loading, rendering and limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.text import ChatTemplate, TemplateError
from tokenspeed_core.text import template as module
from tokenspeed_core.text.template import load_chat_template

USER = [{"role": "user", "content": "hi <é>"}]


def render(source: str, **options: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(USER, None, options)


def test_template_gets_messages_special_tokens_and_options() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{% if loud %}!{% endif %}{{ tools is none }}"
    assert render(source, loud=True) == "<s>hi <é>!True"


def test_tojson_does_not_escape() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi <é>"}'
    assert render("{{ messages[0] | tojson(indent=1, sort_keys=true) }}").startswith(
        '{\n "content"'
    )


def test_loop_controls_and_generation_blocks_work() -> None:
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "01"
    assert render("{% generation %}a{{ messages[0].role }}{% endgeneration %}") == "auser"


def test_message_of_the_template_is_passed_on() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_failing_or_unsafe_template_raises(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    ("limit", "most"), [("MAX_RENDER_SECONDS", 0.0), ("MAX_RENDER_CHARS", 1000)]
)
def test_template_stops_at_its_limits(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: float
) -> None:
    long = "{% for i in range(5000) %}x{% endfor %}"
    assert len(render(long)) == 5000
    monkeypatch.setattr(module, limit, most)
    with pytest.raises(TemplateError, match="characters"):
        render(long)


def test_unknown_template_option_lists_the_known() -> None:
    with pytest.raises(TemplateError, match=r"'speed'.*enable_thinking"):
        render("{{ enable_thinking }}", speed=1)


def test_templates_are_found_in_checkpoints(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, {}) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "config"}))
    assert rendered(tmp_path) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered(tmp_path) == "file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert rendered(tmp_path, str(tmp_path / "mine.jinja")) == "mine"


def rendered(
    folder: Path, chosen: str | None = None, tools: list[dict[str, str]] | None = None
) -> str:
    template = load_chat_template(folder, {}, chosen)
    assert template is not None
    return template.render(USER, tools)


def test_named_templates_can_be_chosen(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered(tmp_path) == "plain"
    assert rendered(tmp_path, tools=[{"a": "b"}]) == "tools"
    assert rendered(tmp_path, "tool_use") == "tools"
    with pytest.raises(CheckpointError, match="default, tool_use"):
        load_chat_template(tmp_path, {}, "missing")


def test_template_syntax_error_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
    with pytest.raises(CheckpointError, match="line 2"):
        load_chat_template(tmp_path, {})


@pytest.mark.parametrize("chosen", [None, "latin.jinja"])
def test_template_that_is_not_utf8_names_its_file(tmp_path: Path, chosen: str | None) -> None:
    file = tmp_path / (chosen or "chat_template.jinja")
    file.write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        load_chat_template(tmp_path, {}, chosen and str(file))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "entry", [{"template": "a"}, {"name": "a"}, {"name": "a", "template": None}, "a"]
)
def test_incomplete_named_template_names_its_file(tmp_path: Path, entry: Any) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "plain"}, entry]})
    )
    with pytest.raises(CheckpointError) as caught:
        load_chat_template(tmp_path, {})
    assert str(config) in str(caught.value)
