"""A DFlash drafter with random weights on a CUDA device: its blocks are those of the published architecture.

Outputs do not depend on it, up to rounding, which may change a choice between almost equal logits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_core.plugins.catalog import Catalog

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))  # helper modules

from dflash_reference import PUBLISHED, TARGET, Reference
from drafted import finish, make_engine
from tiny_families import save_reference
from tokenspeed_testing.requests import request

from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.worker.local import LocalRunner, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_DRAFTS = PUBLISHED["block_size"] - 1


def start(folder: Path, drafter: Path, *, is_captured: bool) -> LocalRunner:
    catalog = Catalog.discover()
    config = Config.from_keywords(
        model=str(folder),
        device="cuda",
        dtype="float32",
        max_num_seqs=8,
        max_total_tokens=4096,
        chunked_prefill_size=256,
        cudagraph_capture_sizes=(1, 4, 8) if is_captured else None,
        enforce_eager=not is_captured,
        speculative_config={"method": "dflash", "model": str(drafter)},
    )
    return build(resolve(config, catalog), catalog, lambda what, done, total: None)


@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "eager"])
def test_drafts_equal_the_published_architecture(tmp_path: Path, is_captured: bool) -> None:
    target = save_reference("Qwen3", tmp_path / "target", **TARGET)
    drafter = Reference()
    drafter.save(tmp_path / "drafter")
    runner = start(tmp_path / "target", tmp_path / "drafter", is_captured=is_captured)
    generator = torch.Generator().manual_seed(3)
    sizes = (5, 17, 30, 64, 9)
    prompts = [torch.randint(0, 8, (size,), generator=generator).tolist() for size in sizes]
    wanted = [request(i, prompt, max_tokens=30) for i, prompt in enumerate(prompts)]
    expected = finish(make_engine(runner), wanted)

    engine = make_engine(runner, max_drafts=NUM_DRAFTS)
    made: list[tuple[int, int, list[int]]] = []
    sample = runner.sample

    def note(step_id: int, late: Any) -> None:
        plan = runner._launched[step_id].plan
        sample(step_id, late)
        torch.cuda.synchronize()
        if plan.next_drafts is None or not plan.next_drafts.num_drafts:
            return
        for slot in plan.slots[plan.wants_logits].tolist():
            number = int(engine.scheduler.columns.sequence_id[slot])
            length = int(runner._state.seq_len[slot])
            made.append((number, length, runner._state.drafts[slot].tolist()))

    runner.sample = note  # type: ignore[method-assign]
    found = finish(engine, wanted)
    assert {i: each.token_ids for i, each in found.items()} == {
        i: each.token_ids for i, each in expected.items()
    }
    num_equal = num_compared = 0
    for number, length, drafts in made:
        tokens = [*prompts[number], *found[number].token_ids]
        if length + 1 + NUM_DRAFTS <= len(tokens):
            _, ids = drafter.block(target, tokens[: length + 1], NUM_DRAFTS)
            num_equal += sum(a == b for a, b in zip(drafts, ids.tolist(), strict=True))
            num_compared += NUM_DRAFTS
    stats = engine.stats()
    print(f"{num_equal} of {num_compared} draft tokens equal, accepted {stats.num_accepted}")
    assert num_compared > 50
    assert num_equal >= 0.97 * num_compared, "rounding changes few draft tokens"
    assert sum(stats.num_accepted) > 0
    runner.close()
