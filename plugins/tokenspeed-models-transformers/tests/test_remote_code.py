"""Models with code in their repository."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from tiny_models import save_reference

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.errors import CheckpointError

pytest.importorskip("tokenspeed_kernels")

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    def forward(self, *arguments, **keywords):
        outputs = super().forward(*arguments, **keywords)
        outputs.logits = -outputs.logits
        return outputs
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_reference("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "own_model.OwnConfig",
            "AutoModelForCausalLM": "own_model.OwnForCausalLM",
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own_model.py").write_text(CODE)
    return tmp_path


def test_code_runs_only_with_the_flag(
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import dynamic_module_utils

    modules = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules)
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        LLM(str(folder), skip_tokenizer_init=True)
    caplog.set_level(logging.INFO, "tokenspeed")
    with LLM(
        str(folder), skip_tokenizer_init=True, trust_remote_code=True, max_total_tokens=64
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        found = llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs[0].token_ids
    assert f"running code from the model's repository: {folder}" in caplog.messages
    assert any("no installed family supports it" in line for line in caplog.messages)
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logits = reference(torch.tensor([[5, 6, 7, *found]])).logits[0]
    assert found == logits[2:-1].argmin(-1).tolist()
