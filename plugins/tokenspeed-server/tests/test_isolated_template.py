"""A template renders in another process, which ends when it exceeds its limits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenspeed_server.isolated_template import IsolatedTemplate, _Renderer

from tokenspeed_core.errors import CheckpointError, RequestFailedError
from tokenspeed_core.files import read_json
from tokenspeed_core.text.template import ChatTemplate, TemplateError

MESSAGES = [{"role": "user", "content": "hé\ud800 🙂", "n": 2**80, "x": [None, True, 1.5]}]
SOURCE = (
    "{{ bos }}{% for m in messages %}{{ m.content }}{{ m.n }}{{ m.x }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if a %}{{ a }}{% endif %}"
    "{% if messages | length > 1 %}{{ raise_exception('too many') }}{% endif %}"
    "{% if add_generation_prompt %}!{% endif %}"
)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
EVIL = {
    "a loop": LOOP,
    "doubling": "{% set n = namespace(s='x' * 999) %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "a product": "{{ 'x' * 10**11 }}",
    "a list": "{{ [1] * 10**11 }}",
    "a filter": "{{ 'x' | center(10**11) }}",
    "a method": "{{ 'x'.ljust(10**11) }}",
    "a format": "{{ '%99999999999d' % 1 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
}


@pytest.fixture(scope="module")
def template() -> Iterator[IsolatedTemplate]:
    template = IsolatedTemplate(ChatTemplate(SOURCE, {"bos": "<s>"}))
    yield template
    template.close()


@pytest.mark.parametrize("tools", [None, [{"name": "f"}]])
@pytest.mark.parametrize("options", [None, {"a": "b"}])
def test_isolated_template_renders_the_same(template: Any, tools: Any, options: Any) -> None:
    plain = ChatTemplate(SOURCE, {"bos": "<s>"})
    for prompt in (True, False):
        expected = plain.render(MESSAGES, tools, options, add_generation_prompt=prompt)
        found = template.render(MESSAGES, tools, options, add_generation_prompt=prompt)
        assert found == expected
    assert template.options == plain.options


def test_process_imports_no_tokenizer_and_no_server() -> None:
    heavy = ("numpy", "tokenizers", "pydantic", "fastapi", "zmq")
    code = "import sys, tokenspeed_server.isolated_template; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert not set(heavy) & set(done.stdout.split())


def test_errors_of_the_template_are_the_same(template: IsolatedTemplate) -> None:
    with pytest.raises(TemplateError, match="too many"):
        template.render(MESSAGES * 2)
    with pytest.raises(TemplateError, match="nonsense"):
        template.render(MESSAGES, options={"nonsense": 1})
    with pytest.raises(TemplateError):
        template.render([{"content": object()}])
    assert template.render(MESSAGES).endswith("!")


def test_large_messages_and_threads_work(template: IsolatedTemplate) -> None:
    with ThreadPoolExecutor(8) as pool:
        sizes = [1, 3_000_000, 5, 70_000] * 4
        messages = [[{"content": "x" * size, "n": 1, "x": []}] for size in sizes]
        texts = list(pool.map(template.render, messages))
    assert [text.count("x") for text in texts] == sizes


@pytest.mark.parametrize("name", EVIL)
def test_template_without_end_fails_its_request_only(name: str) -> None:
    started = time.process_time()
    evil = ChatTemplate(EVIL[name] + "{% if nice %}{% endif %}", {})  # compiling computes nothing
    assert time.process_time() - started < 1.0
    isolated = IsolatedTemplate(evil, max_seconds=0.2)
    for _ in range(2):  # in a new process, if the first one ended
        with pytest.raises(TemplateError):
            isolated.render([])
    isolated.close()


def test_template_that_is_killed_is_replaced(template: IsolatedTemplate) -> None:
    renderer = template._idle.get()
    assert renderer is not None
    os.kill(renderer._process.pid, 9)
    template._idle.put(renderer)
    assert template.render(MESSAGES)


def test_template_is_unavailable_if_its_process_keeps_dying(
    template: IsolatedTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(renderer: _Renderer, data: bytes, seconds: float) -> tuple[str, str]:
        os.kill(renderer._process.pid, 9)
        return ask(renderer, data, seconds)

    ask = _Renderer.ask
    monkeypatch.setattr(_Renderer, "ask", die)
    with pytest.raises(RequestFailedError) as caught:  # the messages are not wrong
        template.render(MESSAGES)
    assert caught.value.reason == "unavailable"
    monkeypatch.undo()
    assert template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
        "{{ 'x' if " + "not " * 9000 + "1 }}",
        "x" * (2 * 2**20),
        "{% autoescape 'x' | center(10**11) %}{% endautoescape %}",
    ],
)
def test_invalid_template_is_rejected_at_start(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {})


def test_odd_files_of_a_checkpoint_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "deep_object.json").write_text('{"a":' * 100_000)
    (tmp_path / "digits.json").write_text('{"a": ' + "9" * 5000 + "}")
    (tmp_path / "folder.json").mkdir()
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(2**40)
    for each in sorted(tmp_path.iterdir()):
        with pytest.raises(CheckpointError):
            read_json(each)
