"""The pages in headless Chromium, with the demo model. `nox -s pages` installs their requirements."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Served, served

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH"),
]
OFFLINE = ("--no-sandbox", "--disable-background-networking", "--disable-component-update")
TIMEOUT = 120_000  # milliseconds; a busy machine is slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("pages")) as address:
        yield address


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest) -> Iterator[playwright.Page]:
    """A page in a new browser, which fails the test at its first error or foreign request."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(OFFLINE))
        page = browser.new_page(color_scheme=request.param, viewport={"width": 1280, "height": 860})
        page.set_default_timeout(TIMEOUT)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda text: (
                text.type == "error"
                and "status of 401" not in text.text  # which makes the page ask for the key
                and problems.append(text.text)
            ),
        )
        page.on(
            "request",
            lambda sent: (
                "127.0.0.1" not in sent.url
                and not sent.url.startswith("data:")
                and problems.append(sent.url)
            ),
        )
        yield page
        browser.close()
    assert not problems


def screenshot(page: playwright.Page, name: str) -> None:
    """Keep a screenshot in the folder SCREENSHOTS, if that variable is set."""
    if folder := os.environ.get("SCREENSHOTS"):
        scheme = (
            "dark"
            if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
            else "light"
        )
        page.screenshot(path=str(Path(folder) / f"{name}-{scheme}.png"))


def wait_for_statistics(page: playwright.Page) -> None:
    """Wait for the end of an answer."""
    playwright.expect(page.locator("#statistics")).not_to_be_empty(timeout=TIMEOUT)


def ask(page: playwright.Page, text: str) -> None:
    """Send a message by the keyboard, and wait for the end of the answer."""
    page.locator("#question").fill(text)
    page.keyboard.press("Enter")
    wait_for_statistics(page)


def test_playground_answers_with_thinking_and_statistics(
    server: Served, page: playwright.Page
) -> None:
    page.goto(server.url)
    page.get_by_label("Temperature").fill("0")
    ask(page, "what is 23 + 45?")
    answer = page.locator("article.assistant > .text")
    assert "68" in answer.inner_text()
    assert "carry" not in answer.inner_text()
    assert not page.locator("details.thinking .text").is_visible()
    page.get_by_text("Thinking").click()
    assert "carry" in page.locator("details.thinking .text").inner_text()
    assert re.search(r"\d+ tokens/s", page.locator("#statistics").inner_text())
    page.get_by_text("Kernels that run").click()
    page.locator("#kernelTable table").wait_for()
    assert "torch" in page.locator("#kernelTable").inner_text()
    screenshot(page, "playground")


def test_playground_calls_a_tool_and_sends_its_result(
    server: Served, page: playwright.Page
) -> None:
    page.goto(server.url)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tools").fill(
        '[{"type": "function", "function": {"name": "get_weather", "parameters": '
        '{"type": "object", "properties": {"city": {"type": "string"}}}}}]'
    )
    ask(page, "What is the weather in Paris?")
    assert "get_weather" in page.locator(".call").inner_text()
    page.get_by_label("Result of the tool").fill('{"temperature": 21}')
    page.get_by_role("button", name="Send the result").click()
    playwright.expect(page.locator("article.assistant")).to_have_count(2, timeout=TIMEOUT)
    wait_for_statistics(page)
    screenshot(page, "tool-call")


def test_playground_shows_why_a_request_is_refused(server: Served, page: playwright.Page) -> None:
    page.goto(server.url)
    page.get_by_label("Tools").fill("[1,")
    page.locator("#question").fill("Hello")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    assert "JSON" in page.get_by_role("alert").inner_text()
    assert page.locator("#question").input_value() == "Hello"


def test_escape_stops_an_answer(server: Served, page: playwright.Page) -> None:
    page.goto(server.url)
    page.locator("#question").fill("what is 23 + 45?")
    page.keyboard.press("Enter")
    page.locator("article.assistant").wait_for()
    page.keyboard.press("Escape")
    playwright.expect(page.locator("#send")).to_be_enabled(timeout=TIMEOUT)


def test_answer_fits_the_schema_of_the_page(server: Served, page: playwright.Page) -> None:
    page.goto(server.url)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Format of the answer").select_option("json_schema")
    schema = json.loads(page.get_by_label("JSON schema").input_value())
    ask(page, "what is 23 + 45?")
    answer = json.loads(page.locator("article.assistant > .text").inner_text())
    assert set(answer) == set(schema["required"])
    assert isinstance(answer["answer"], int)
    screenshot(page, "schema")


def test_page_asks_for_the_key_and_keeps_it(server: Served, page: playwright.Page) -> None:
    def refuse_without_key(route: playwright.Route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "missing or wrong API key"}})

    page.route("**/v1/**", refuse_without_key)
    page.goto(server.url)
    page.get_by_label("API key").wait_for()
    screenshot(page, "key")
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    page.get_by_text("demo", exact=True).wait_for()
    page.goto(f"{server.url}/dashboard")
    page.get_by_text("running requests").wait_for()


def test_page_of_the_api_shows_routes_and_fields(server: Served, page: playwright.Page) -> None:
    page.goto(f"{server.url}/docs")
    page.get_by_text("/v1/chat/completions", exact=True).click()
    page.get_by_text("chat_template_kwargs").first.wait_for()
    page.locator("details[open] summary", has_text="ToolSpec").click()
    page.get_by_text("FunctionSpec").first.wait_for()
    screenshot(page, "api")


def test_dashboard_shows_the_engine_live(server: Served, page: playwright.Page) -> None:
    page.goto(f"{server.url}/dashboard")
    page.get_by_text("running requests").wait_for()
    page.locator("#kernelTable table").wait_for()
    assert page.locator("svg polyline").count() == 6
    assert "free" in page.locator("#legend").inner_text()
    screenshot(page, "dashboard")


def test_keyboard_reaches_every_control(server: Served, page: playwright.Page) -> None:
    page.goto(server.url)
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    fields = {"question", "system", "temperature", "top_p", "max_tokens", "seed", "tools", "format"}
    assert fields | {"send", "clear"} <= reached
