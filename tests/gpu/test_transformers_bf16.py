"""Models that run through transformers, in bfloat16 with CUDA graphs, compared with transformers where tokens differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_core import LLM, SamplingParams

pytest.importorskip("transformers", minversion="5.20")  # as the plugin requires
sys.path.insert(
    0, str(Path(__file__).parents[2] / "plugins" / "tokenspeed-models-transformers" / "tests")
)  # for tiny_models

from tiny_models import save_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
TOP = 5
PROMPTS = [[(seed * 31 + i * 17) % 95 + 3 for i in range(5 + 7 * seed)] for seed in range(6)]
# Heads of at least 16 values, as kernels need them.
MODELS: dict[str, dict[str, Any]] = {
    "cohere2": {},
    "exaone4": {},
    "glm": {"head_dim": 16},
    "gpt2": {},
    "gpt_oss": {"head_dim": 16},
    "granite_swa": {},
    "minicpm3": {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    "olmoe": {},
    "phi": {},
    "qwen3_moe": {"head_dim": 16},
    "starcoder2": {},
    "vaultgemma": {"head_dim": 16},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_first_divergence_is_in_both_top_fives(model_type: str, tmp_path: Path) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 64, **MODELS[model_type]}
    reference = save_reference(model_type, tmp_path, **changes).to(DEVICE, torch.bfloat16)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=TOP)
    with LLM(
        str(tmp_path),
        device=DEVICE,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_num_seqs=8,
        max_total_tokens=4096,
        chunked_prefill_size=32,
        hf_overrides={"architectures": ["*"]},
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    for output in outputs:
        ours, ids = output.outputs[0], output.prompt_token_ids
        with torch.inference_mode():
            tokens = torch.tensor([ids + ours.token_ids], device=DEVICE)
            logits = reference(tokens).logits[0, len(ids) - 1 : -1]
        theirs = logits.argmax(-1).tolist()
        pairs = enumerate(zip(ours.token_ids, theirs, strict=True))
        at = next((i for i, (mine, other) in pairs if mine != other), None)
        if at is not None:
            assert ours.logprobs is not None
            assert ours.token_ids[at] in logits[at].topk(TOP).indices.tolist()
            assert theirs[at] in ours.logprobs[at]
