"""Third-party kernels that exit the process or return NaN."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from plugin_files import write_plugin
from serving import run_command, served

from tokenspeed_core import LLM, TokenSpeedError

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


def test_kernel_that_exits_is_named(tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--attention-backend", "strange/leaves")
    status, err = run_command(tmp_path, "serve", "--port", "0", *flags)
    assert status == 2
    line = err.splitlines()[-1]
    for part in ("SystemExit: 4", "attention (prefill)", "strange/leaves", "--attention-backend"):
        assert part in line


def test_kernel_without_finite_results_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site")
    backends = {"decode": "strange/empty", "prefill": "torch"}
    try:
        with pytest.raises(TokenSpeedError) as refused:
            LLM(device="cpu", attention_backend=backends, max_total_tokens=1024)
    finally:
        for module in ("strange_specs", "strange_attention"):
            sys.modules.pop(module, None)
    line = str(refused.value)
    for part in ("logits", "strange/empty", "--attention-backend.decode"):
        assert part in line
    assert "prefill" not in line


@pytest.mark.release
def test_dummy_weights_are_served_with_any_logits(tmp_path: Path) -> None:
    flags = ("--attention-backend", "strange/empty", "--load-format", "dummy")
    with served(tmp_path, *flags) as running, running.http() as http:
        assert http.get("/health").status_code == 200
