"""Each family, from a checkpoint on disk through the runner's paged cache, picks the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_families import FAMILIES, save_reference

from tokenspeed_core.checkpoint import resolve_checkpoint
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.runner.config import RunnerConfig
from tokenspeed_core.runner.local import LocalRunner, build
from tokenspeed_core.testing.plans import PlanMaker

PROMPTS = {"a": list(range(3, 26)), "b": [7, 7, 90, 1], "c": list(range(60, 20, -1))}


def start(folder: Path) -> tuple[LocalRunner, int]:
    """Return a runner of a checkpoint, and the number of its cache groups."""
    catalog = Catalog.discover()
    found = resolve_checkpoint(str(folder), catalog)
    config = RunnerConfig(
        checkpoint_path=str(found.path), hf_config=found.config, model_spec=found.spec, model_info=found.info,
        dtype=found.info.dtype, device="cpu", load_format="auto", max_model_len=128, max_num_seqs=4,
        max_num_tokens=128, block_size=4, max_total_tokens=2048,
    )
    return build(config, catalog, lambda what, done, total: None), len(found.info.cache_groups)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_through_the_paged_cache_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = save_reference(family, tmp_path)
    runner, num_groups = start(tmp_path)
    maker = PlanMaker(runner.block_size, num_groups)
    for slot, (name, prompt) in enumerate(PROMPTS.items()):
        maker.add(name, prompt, slot)
    maker.step(runner, chunks={"a": 23})
    maker.step(runner, decodes=["a"], chunks={"b": 4, "c": 11})
    maker.step(runner, decodes=["a", "b"], chunks={"c": 29})
    for _ in range(12):
        maker.step(runner, decodes=list(PROMPTS))
    for name, sequence in maker.sequences.items():
        with torch.inference_mode():
            logits = reference(torch.tensor([sequence.tokens])).logits[0]
        for at in range(sequence.num_prompt - 1, len(sequence.tokens) - 1):
            chosen = logits[at, sequence.tokens[at + 1]]
            assert logits[at].max() - chosen <= 1e-4, f"{name}, position {at}"
