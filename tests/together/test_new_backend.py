"""A stranger's backend, made by `plugins new`, is installed beside what is installed and served from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tokenspeed_core.cli import main

ASK = """
from tokenspeed_core import LLM, SamplingParams
with LLM(device="cpu", attention_backend="stranger/attention") as llm:
    (out,) = llm.chat([{"role": "user", "content": "what is 23 + 45?"}], SamplingParams(temperature=0))
    assert llm.kernel_plan.backends()["attention"] == ("stranger/attention",), llm.kernel_plan.backends()
    print(out.outputs[0].text)
"""


def test_a_backend_made_and_installed_here_answers(tmp_path: Path) -> None:
    assert main(["plugins", "new", "attention", "stranger", "--path", str(tmp_path / "made")]) == 0
    words = ("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation", "--target")
    subprocess.run([sys.executable, "-P", *words, str(tmp_path / "site"), str(tmp_path / "made")], check=True)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", ASK], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "68" in done.stdout
