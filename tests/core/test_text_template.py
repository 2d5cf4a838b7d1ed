"""Chat templates: found, chosen, rendered, and kept within their limits."""

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


def test_a_template_sees_messages_special_tokens_and_options() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{% if loud %}!{% endif %}{{ tools is none }}"
    assert render(source, loud=True) == "<s>hi <é>!True"


def test_json_is_written_as_it_is_without_escapes() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi <é>"}'
    assert render("{{ messages[0] | tojson(indent=1, sort_keys=true) }}").startswith(
        '{\n "content"'
    )


def test_loop_controls_and_generation_blocks_work() -> None:
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "01"
    assert render("{% generation %}a{{ messages[0].role }}{% endgeneration %}") == "auser"


def test_a_templates_own_refusal_is_passed_on() -> None:
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
def test_a_template_that_breaks_or_breaks_out_is_an_error(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    ("limit", "most"), [("MAX_RENDER_SECONDS", 0.0), ("MAX_RENDER_CHARS", 1000)]
)
def test_a_template_that_goes_beyond_a_limit_is_stopped(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: float
) -> None:
    long = "{% for i in range(5000) %}x{% endfor %}"
    assert len(render(long)) == 5000
    monkeypatch.setattr(module, limit, most)
    with pytest.raises(TemplateError, match="without coming to an end"):
        render(long)


def test_an_option_that_the_template_does_not_read_is_refused_with_those_it_does() -> None:
    with pytest.raises(TemplateError, match="no option 'speed'; it has: enable_thinking"):
        render("{{ enable_thinking }}", speed=1)


def test_templates_are_found_where_checkpoints_keep_them(tmp_path: Path) -> None:
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


def test_named_templates_are_chosen_by_name_and_by_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered(tmp_path) == "plain"
    assert rendered(tmp_path, tools=[{"a": "b"}]) == "tools"
    assert rendered(tmp_path, "tool_use") == "tools"
    with pytest.raises(CheckpointError, match="which has: default, tool_use"):
        load_chat_template(tmp_path, {}, "missing")


def test_a_bad_template_is_an_error_of_the_start_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
    with pytest.raises(CheckpointError, match="line 2"):
        load_chat_template(tmp_path, {})


@pytest.mark.parametrize("chosen", [None, "latin.jinja"])
def test_a_template_that_is_no_utf_8_is_an_error_that_names_its_file(
    tmp_path: Path, chosen: str | None
) -> None:
    file = tmp_path / (chosen or "chat_template.jinja")
    file.write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        load_chat_template(tmp_path, {}, chosen and str(file))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "entry", [{"template": "a"}, {"name": "a"}, {"name": "a", "template": None}, "a"]
)
def test_a_named_template_without_a_name_or_a_text_is_an_error_that_names_its_file(
    tmp_path: Path, entry: Any
) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "plain"}, entry]})
    )
    with pytest.raises(CheckpointError) as caught:
        load_chat_template(tmp_path, {})
    assert (
        str(caught.value)
        == f"{config}: each entry of its chat_template needs a name and a template"
    )
