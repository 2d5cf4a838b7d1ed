"""The files of the pages; tests/cpu/test_pages.py uses them in a browser."""

from __future__ import annotations

import asyncio
import re
from importlib.resources import files

import httpx
import pytest
from fastapi import FastAPI
from tokenspeed_server import pages


@pytest.mark.parametrize("name", ["playground", "dashboard", "api"])
def test_scripts_use_only_ids_that_the_page_has(name: str) -> None:
    folder = files(pages)
    page = folder.joinpath(f"{name}.html").read_text("utf-8")
    script = folder.joinpath(f"static/{name}.js").read_text("utf-8")
    used = set(re.findall(r'byId\("(\w+)"\)', script))
    assert used
    assert used <= set(re.findall(r'id="(\w+)"', page))


def test_pages_allow_no_other_site() -> None:
    asyncio.run(_read_all_pages())


async def _read_all_pages() -> None:
    app = FastAPI(docs_url=None)
    app.include_router(pages.router)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for path in pages.PAGE_PATHS:
            answer = await client.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
            others = re.findall(r"https?://[\w./]+", answer.text)
            assert set(others) <= {"http://www.w3.org/2000/svg"}
