"""Pages for browsers: a playground, a dashboard, and the API. No script or style comes from another site."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

_PAGES = {"/": "playground.html", "/dashboard": "dashboard.html", "/docs": "api.html"}
_STATIC = (
    "api.css",
    "api.js",
    "common.css",
    "common.js",
    "dashboard.css",
    "dashboard.js",
    "playground.css",
    "playground.js",
)
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "style-src 'self'; script-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

# The pages need no API key because they contain no data about the model. Their requests need the key.
PAGE_PATHS = (*_PAGES, *(f"/static/{name}" for name in _STATIC))

router = APIRouter()


def _serve(path: str, name: str) -> None:
    """Add the route of a file."""
    media_type = _TYPES[name.rpartition(".")[2]]

    async def page() -> Response:
        return Response(files(__name__).joinpath(name).read_bytes(), 200, _HEADERS, media_type)

    router.add_api_route(path, page, include_in_schema=False)


for _path, _name in _PAGES.items():
    _serve(_path, _name)
for _name in _STATIC:
    _serve(f"/static/{_name}", f"static/{_name}")
