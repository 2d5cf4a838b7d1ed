"""Plugin distributions that tests write, and their catalog."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import Distribution

from tokenspeed_core.plugins import Catalog, Selection

Install = Callable[..., list[Distribution]]


def attention(name: str, value: str = "nowhere:SPEC [api1]") -> str:
    return f"[tokenspeed.kernels.attention]\n{name} = {value}\n"


def discover(found: list[Distribution], text: str | None = None, **options: object) -> Catalog:
    environ = {} if text is None else {"TOKENSPEED_PLUGINS": text}
    no_plugins = bool(options.pop("no_plugins", False))
    selection = Selection.read(environ, no_plugins=no_plugins)
    return Catalog.discover(selection, distributions=found, core_version="0.1.0", **options)  # type: ignore[arg-type]
