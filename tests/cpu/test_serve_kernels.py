"""Third-party kernels that exit the process or return NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugin_files import write_plugin
from serving import run_command, served

STRANGE = """
from tokenspeed_core.api import Capability, KernelSpec

def spec(name):
    anywhere = Capability(("cpu",), ("bfloat16", "float32"))
    return KernelSpec("attention", f"strange/{name}", anywhere, f"strange_attention:{name}")

LEAVES, EMPTY = spec("leaves"), spec("empty")
"""
ATTENTION = """
import sys

from tokenspeed_kernels.reference.attention import TorchAttention

class leaves(TorchAttention):
    def prepare(self, step):
        sys.exit(4)

class empty(TorchAttention):
    def forward(self, q, k_cache, v_cache, out):
        out.fill_(float("nan"))
"""


@pytest.fixture(autouse=True)
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the two kernels above."""
    entries = {
        "strange/leaves": "strange_specs:LEAVES [api1]",
        "strange/empty": "strange_specs:EMPTY [api1]",
    }
    modules = {"strange_specs": STRANGE, "strange_attention": ATTENTION}
    write_plugin(tmp_path / "site", "strange", "kernels.attention", entries, modules)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


def start_error(folder: Path, *flags: str) -> str:
    """Return the error line of a start."""
    status, err = run_command(folder, "serve", "--port", "0", "--device", "cpu", *flags)
    assert status == 2
    return err.splitlines()[-1]


def test_kernel_that_exits_is_named(tmp_path: Path) -> None:
    line = start_error(tmp_path, "--attention-backend", "strange/leaves")
    for part in ("SystemExit: 4", "attention (prefill)", "strange/leaves", "--attention-backend"):
        assert part in line


def test_kernel_without_finite_results_ends_the_start(tmp_path: Path) -> None:
    line = start_error(
        tmp_path,
        "--attention-backend.decode",
        "strange/empty",
        "--attention-backend.prefill",
        "torch",
    )
    for part in ("logits", "strange/empty", "--attention-backend.decode"):
        assert part in line
    assert "prefill" not in line


@pytest.mark.release
def test_dummy_weights_are_served_with_any_logits(tmp_path: Path) -> None:
    flags = ("--attention-backend", "strange/empty", "--load-format", "dummy")
    with served(tmp_path, *flags) as running, running.http() as http:
        assert http.get("/health").status_code == 200
