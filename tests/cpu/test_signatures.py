"""Recorded signatures of vendor libraries, and stubs that accept only calls that match them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from tokenspeed_testing.signatures import kept, library_of, parsed, read, renew, restricted_to

SOURCE = """
class Wrapper:
    @overload
    def plan(self, rows): ...
    def plan(self, rows: int, /, size: int = 16, *others, out: Tensor | None = None, name, **more) -> None: ...
try:
    from missing import thing
    def multiply(a, b, d, c=None): ...
except ImportError:
    pass
product = multiply
def run(a): ...
def load():
    def run(b): ...
"""
CODE = b"\x7fELF\0prefwd(Tensor x) -> ()\0fwd(Tensor q,Tensor(out!)? out = None, int n = 0) -> (Tensor(out!), Tensor)\0"
NAMES = [
    "vendor/plan.py:Wrapper.plan",
    "vendor/plan.py:product",
    "vendor/_C.so:fwd",
    "vendor/plan.py:run",
]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "a_vendor-1.2.post3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vendor/plan.py", SOURCE)
        archive.writestr("vendor/_C.so", CODE)
    return path


def test_signatures_are_read_without_importing(wheel: Path, tmp_path: Path) -> None:
    path = tmp_path / "signatures.json"
    path.write_text(json.dumps({"read": NAMES}))
    renew(path, [wheel])
    assert kept(path) == {
        "a-vendor==1.2.post3": {
            NAMES[0]: "(self, rows, /, size=..., *others, out=..., name, **more)",
            NAMES[1]: "(a, b, d, c=...)",
            NAMES[2]: "(Tensor q, Tensor(out!)? out = None, int n = 0) -> (Tensor(out!), Tensor)",
            NAMES[3]: "(a)",
        }
    }
    assert library_of(wheel) == "a-vendor==1.2.post3"
    assert (
        "signatures.json WHEEL ..., of a-vendor==1.2.post3"
        in json.loads(path.read_text())["made by"]
    )


@pytest.mark.parametrize(
    "name",
    ["vendor/none.py:f", "vendor/plan.py:Wrapper.run", "vendor/_C.so:wd", "vendor/plan.py:f"],
)
def test_renewal_fails_if_the_wheel_lacks_a_name(wheel: Path, name: str) -> None:
    with pytest.raises(LookupError, match="has no"):
        read(wheel, name)


def test_stub_accepts_only_the_signature() -> None:
    plan = restricted_to(
        lambda *given, **named: True, "(self, rows, /, size=..., *others, out=..., name, **more)"
    )
    assert plan(1, 2, name="")
    assert plan(1, 2, 3, 4, name="", out=5, other=6)
    with pytest.raises(TypeError, match="'name'"):
        plan(1, 2)
    with pytest.raises(TypeError, match="'rows'"):
        plan(1, size=2, name="")


def test_stub_rejects_calls_that_any_version_rejects() -> None:
    def multiply(a: int, *, scale: int = 1) -> int:
        return a * scale

    assert restricted_to(multiply, "(a, scale=...)")(2, scale=3) == 6
    with pytest.raises(TypeError, match="scale"):
        restricted_to(multiply, "(a, scale=...)", "(a, factor=...)")(2, scale=3)
    assert str(parsed("(a, b=...)")) == "(a, b=Ellipsis)"
