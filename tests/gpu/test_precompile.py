"""A start with an empty Triton cache precompiles everything that the warm-up and requests launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernels.triton import precompile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs Hopper or newer",
    ),
    pytest.mark.skipif(precompile.num_processors() == 1, reason="needs a second processor"),
]

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 9000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
START = """
import json, sys, threading
import triton
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.local import build
from tokenspeed_kernels.triton import precompile
from tokenspeed_testing.plans import PlanMaker

compiled, precompiled, launched = [], set(), set()
triton.knobs.compilation.listener = lambda *, metadata, cache_hit, **_: cache_hit or compiled.append(
    (metadata["name"], metadata["hash"])
)
compile_it = precompile._Kernel._do_compile

def note(self, key, *others):
    (precompiled if precompile._IS_PRECOMPILING.get() else launched).add(f"{self.__name__} {key}")
    return compile_it(self, key, *others)

precompile._Kernel._do_compile = note
catalog = Catalog.discover()
runner = build(resolve(Config.from_keywords(**json.loads(sys.argv[1])), catalog), catalog, lambda *_: None)
for thread in threading.enumerate():
    if thread.name == "precompile":
        thread.join()
found = {"precompiled": len(precompiled), "twice": len(compiled) - len(set(compiled)), "late": sorted(launched - precompiled)}
compiled.clear()
maker, most, budget = PlanMaker(runner.block_size), runner.resolved.limits.max_num_seqs, int(sys.argv[2])
decoding = [f"decode {slot}" for slot in range(most * 3 // 4)]
for slot, name in enumerate(decoding):
    maker.add(name, range(8), slot, temperature=slot % 2 / 2)
maker.step(runner, chunks=dict.fromkeys(decoding, 8))
for num_decodes in sorted({0, 1, 3, 16, 17, 40, 64, 100, len(decoding)}):
    decodes = decoding[:num_decodes]
    if decodes:
        maker.step(runner, decodes)
    for lengths in ([20], [300] * 3, [1900, 150], [4100], [1, 4100], [1500] * 3, [100] * 50, [8192]):
        lengths, left = lengths[:most - len(decoding)], budget - len(decodes)
        if sum(lengths) <= left or len(lengths) == 1:
            names = {f"{num_decodes} {place} {length}": min(length, left) for place, length in enumerate(lengths)}
            for place, (name, length) in enumerate(names.items()):
                maker.add(name, range(length), len(decoding) + place, temperature=place % 2)
            maker.step(runner, decodes, names)
print(json.dumps({**found, "steps": maker.next_step, "by requests": sorted({name for name, _ in compiled})}))
"""


@pytest.mark.parametrize(
    ("num_heads", "max_num_seqs", "chunk_size"), [(16, 256, 8192), (32, 256, 4096), (8, 5, 512)]
)
def test_start_precompiles_everything_that_requests_launch(
    tmp_path: Path, num_heads: int, max_num_seqs: int, chunk_size: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_attention_heads": num_heads}))
    settings: dict[str, Any] = {
        "model": str(tmp_path),
        "dtype": "bfloat16",
        "device": "cuda",
        "load_format": "dummy",
        "max_model_len": 8192,
        "max_num_seqs": max_num_seqs,
        "chunked_prefill_size": chunk_size,
        "max_total_tokens": 400_000,
    }
    run = subprocess.run(
        [sys.executable, "-c", START, json.dumps(settings), str(chunk_size)],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["precompiled"] >= 15
    assert found["twice"] == 0
    assert found["late"] == []
    assert found["steps"] > 15
    assert found["by requests"] == []
