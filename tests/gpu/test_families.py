"""Each model family on a GPU, compared with transformers at the first divergence.

Families with experts run in float32, others in bfloat16: the scores of two experts often differ by less than a rounding
of bfloat16, and another expert gives other logits.

Before 5.19, transformers ignores the clamp of gpt-oss' configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tokenspeed_core import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))  # for tiny_families

from tiny_families import FAMILIES, save_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
TOP = 5
PROMPTS = [[(seed * 31 + i * 17) % 95 + 3 for i in range(5 + 7 * seed)] for seed in range(8)]


@pytest.mark.parametrize("family", FAMILIES)
def test_first_divergence_from_transformers_is_in_both_top_fives(
    family: str, tmp_path: Path
) -> None:
    if family == "GptOss":
        pytest.importorskip("transformers", minversion="5.19")
    reference = save_reference(family, tmp_path).to(device=DEVICE)
    has_experts = any("experts" in name for name, _ in reference.named_modules())
    dtype = "float32" if has_experts else "bfloat16"
    reference.to(getattr(torch, dtype))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=TOP)
    with LLM(
        str(tmp_path),
        device=DEVICE,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_num_seqs=8,
        max_total_tokens=4096,
        chunked_prefill_size=64,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    for output in outputs:
        ours, ids = output.outputs[0], output.prompt_token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + ours.token_ids], device=DEVICE)).logits[
                0, len(ids) - 1 : -1
            ]
        theirs = logits.argmax(-1).tolist()
        at = next(
            (i for i, (a, b) in enumerate(zip(ours.token_ids, theirs, strict=True)) if a != b), None
        )
        if at is not None:
            assert ours.logprobs is not None
            assert ours.token_ids[at] in logits[at].topk(TOP).indices.tolist()
            assert theirs[at] in ours.logprobs[at]
