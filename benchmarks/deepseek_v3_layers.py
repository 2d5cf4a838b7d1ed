# mypy: allow-untyped-calls
"""Check and time the layers of DeepSeek-V3 with block-wise FP8 weights on one GPU.

    python benchmarks/deepseek_v3_layers.py [--layers 2] [--kernel-backend moe_experts_fp8_block=deepgemm]

First compares attention (MLA) and experts (MoE) of a reduced shape with the reference kernels. Then prints µs per
layer of the published shape with random weights, medians of 7: decodes of 1, 16 and 128 tokens after CONTEXT tokens
each, and a prefill of 8192. A CUDA graph holds the layers one after another, each with separate weights and a
separate cache. Two layers exceed the L2 cache. A block starts with its norm and adds the residual.

Bytes are those of weights, of cache entries, and of the experts that serve a token, each counted once. Operations are
those of matrix products. The floor sums, over the parts of a block, the longer of moving the bytes and of computing
at the device's peak: FP8 for block-wise weights, bfloat16 for attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kernel_cases import attention_step
from mla import BANDWIDTH, PEAK, timed
from tokenspeed_models_deepseek.describe import DeepseekConfig, read_v3
from torch import Tensor

from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.worker.assemble import assemble
from tokenspeed_core.worker.attention import bind_arena
from tokenspeed_core.worker.inputs import GroupInputs
from tokenspeed_models.layers.decoder import DecoderLayer
from tokenspeed_models.loading.dummy import read_dummy

FP8_PEAK = 2 * PEAK
CONTEXT = 4096
PREFILL = 8192
DECODES = (1, 16, 128)
# The published configuration, with a small vocabulary and without the dense layers at the start.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 0,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 1024,
}
REDUCED = {
    **PUBLISHED,
    "hidden_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 32,
    "num_attention_heads": 16,
    "q_lora_rank": 384,
}
COMPARED = (
    "linear_fp8_block",
    "moe_experts_fp8_block",
    "mla_write",
    "mla_absorb",
    "mla_decode",
    "mla_project",
    "mla_prefill",
)
# Between kernels that round intermediate results to bfloat16, and then to FP8, at different places.
MAX_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of a step: one of each of `num_rows` sequences, or a whole prompt of `num_queries`."""

    num_rows: int
    num_queries: int
    seq_len: int

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return self.num_rows * self.num_queries

    def __str__(self) -> str:
        if self.num_queries > 1:
            return f"prefill {self.num_queries}"
        return f"decode {self.num_rows} x {self.seq_len}"


CHECKED = (Step(1, 1, 300), Step(16, 1, 300), Step(1, 2048, 2048))  # with the reduced shape


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and operations of a part, and the peak of its operations per second."""

    num_bytes: float
    num_operations: float
    peak: float = FP8_PEAK

    @property
    def floor(self) -> float:
        """The lower bound of the part's time, in µs."""
        return max(self.num_bytes / BANDWIDTH, self.num_operations / self.peak) * 1e6


class Layers:
    """The decoder layers of a configuration with random weights, and a KV cache for one kind of step at a time."""

    def __init__(
        self,
        config: Mapping[str, Any],
        num_layers: int,
        device: torch.device,
        kernel_backend: Mapping[str, str],
        max_tokens: int,
        *,
        is_captured: bool = True,
    ) -> None:
        config = {**config, "num_hidden_layers": num_layers}
        self.config: DeepseekConfig = read_v3(config)
        settings, catalog = resolved(config, device.type, kernel_backend, is_captured=is_captured)
        self.device, assembly = device, assemble(settings, catalog, device)
        self._build = assembly.build
        self.block_size = assembly.block_size
        assembly.build.bind_attention(assembly.limits)
        model: Any = assembly.model
        model.load_weights(read_dummy("", model, lambda done, total: None))
        self.layers: tuple[DecoderLayer, ...] = model.layers
        layout = assembly.pool.layout
        self._arena = torch.zeros(
            (layout.num_pages(max_tokens), layout.page_bytes), dtype=torch.uint8, device=device
        )
        bind_arena(self._build.cached_layers, self._arena, layout, self._build.kv_dtype)
        for layer in self._build.cached_layers:
            (cache,) = layer.caches
            cache.normal_(generator=torch.Generator(device).manual_seed(layer.index))
        self.backends = {
            planned.op: planned.backend
            for planned in assembly.selector.plan().ops
            if planned.op.startswith(("linear", "moe", "mla"))
        }

    def begin(self, step: Step) -> Tensor:
        """Prepare a step for attention. Returns the positions, int64 [T]."""
        is_decode = step.num_queries == 1
        made, _ = attention_step(
            [step.num_queries] * step.num_rows,
            [step.seq_len] * step.num_rows,
            self.device,
            max_model_len=step.seq_len if is_decode else 0,
            block_size=self.block_size,
        )
        first = step.seq_len - step.num_queries
        positions = torch.arange(first, step.seq_len, device=self.device).repeat(step.num_rows)
        rows = torch.arange(step.num_rows, device=self.device).repeat_interleave(step.num_queries)
        blocks = made.block_table[rows, positions // self.block_size].long()
        slots = blocks * self.block_size + positions % self.block_size
        (group,) = self._build.groups.values()
        group.begin(GroupInputs(slots, made, step.num_rows if is_decode else 0, None, None))
        return positions

    def stream(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the output of an earlier block, and the residual, each bfloat16 [T, hidden]."""
        generator = torch.Generator(self.device).manual_seed(num_tokens)
        shape = (2, num_tokens, self.config.hidden_size)
        x, residual = torch.randn(
            shape, generator=generator, device=self.device, dtype=torch.bfloat16
        )
        return x, residual

    def num_used_experts(self, num_tokens: int) -> float:
        """Return how many experts serve a token of `stream`, the mean over layers."""
        x, residual = self.stream(num_tokens)
        used: list[int] = []
        for layer in self.layers:
            normed, _ = layer.post_norm.add(x, residual.clone())
            moe: Any = layer.mlp
            used.append(len(set(moe.router(normed)[1].flatten().tolist())))
        mean: float = statistics.mean(used)
        return mean


def main() -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=int, default=2, help="number of layers, of 12 GB of weights each"
    )
    parser.add_argument(
        "--kernel-backend", nargs="*", default=[], metavar="OP=NAME", help="backends to choose"
    )
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    options = parser.parse_args()
    chosen = dict(each.split("=", 1) for each in options.kernel_backend)
    device, begin = torch.device("cuda"), time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    check(device, chosen)
    print(f"checked after {time.perf_counter() - begin:.0f} s", flush=True)
    max_tokens = max(max(DECODES) * CONTEXT, PREFILL)
    layers = Layers(PUBLISHED, options.layers, device, chosen, max_tokens)
    print(f"loaded after {time.perf_counter() - begin:.0f} s; kernels: {layers.backends}")
    found = []
    with torch.inference_mode():
        for row in rows(layers):
            found.append(row)
            print(
                f"{row['step']:16} {row['block']:16} {row['microseconds']:9.1f} µs   floor {row['floor']:8.1f} µs "
                f"({row['floor'] / row['microseconds']:4.0%})  {row['megabytes']:9.1f} MB  {row['gigaflops']:9.1f} GFLOP",
                flush=True,
            )
    print(f"finished after {time.perf_counter() - begin:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


def check(device: torch.device, kernel_backend: Mapping[str, str]) -> None:
    """Compare both blocks of the reduced shape with the reference kernels. Raises AssertionError."""
    max_tokens = max(step.num_rows * (step.seq_len + 256) for step in CHECKED)
    ours = Layers(REDUCED, 1, device, kernel_backend, max_tokens)
    # A CUDA graph cannot hold the reference kernels.
    torch_backend = dict.fromkeys(COMPARED, "torch")
    reference = Layers(REDUCED, 1, device, torch_backend, max_tokens, is_captured=False)
    assert {reference.backends[op] for op in COMPARED} == {"torch"}, reference.backends
    with torch.inference_mode():
        for step in CHECKED:
            outputs = [_blocks(layers, step) for layers in (ours, reference)]
            for name, found, expected in zip(("attention", "MoE"), *outputs, strict=True):
                error = float((found - expected).float().norm() / expected.float().norm())
                print(f"reduced shape, {step}: {name} differs by {error:.1e} from the reference")
                assert error < MAX_ERROR, f"{name} of {step}: relative error {error:.2e}"


def _blocks(layers: Layers, step: Step) -> tuple[Tensor, Tensor]:
    """Return the outputs of the first layer's attention and experts for the same input."""
    positions, (layer, *_) = layers.begin(step), layers.layers
    x, residual = layers.stream(step.num_tokens)
    attention, _ = layer.attention(layer.input_norm, x, residual.clone(), positions)
    experts, _ = layer.mlp(layer.post_norm, x, residual.clone())
    return attention, experts


def rows(layers: Layers) -> Iterator[dict[str, Any]]:
    """Yield a measurement of each block at each step."""
    decodes = [Step(num_rows, 1, CONTEXT) for num_rows in DECODES]
    for step in (*decodes, Step(1, PREFILL, PREFILL)):
        yield from measure(layers, step)


def measure(layers: Layers, step: Step) -> Iterator[dict[str, Any]]:
    """Yield the time and the work of both blocks."""
    positions = layers.begin(step)
    x, residual = layers.stream(step.num_tokens)
    num_used = layers.num_used_experts(step.num_tokens)

    def attention(index: int) -> None:
        layer = layers.layers[index]
        layer.attention(layer.input_norm, x, residual, positions)

    def experts(index: int) -> None:
        layer = layers.layers[index]
        layer.mlp(layer.post_norm, x, residual)

    for name, run, work in (
        ("attention", attention, attention_work(layers.config, step)),
        (f"MoE, {num_used:.1f} used", experts, moe_work(layers.config, step.num_tokens, num_used)),
    ):
        yield {
            "step": str(step),
            "block": name,
            "microseconds": timed(run, len(layers.layers)),
            "floor": sum(each.floor for each in work),
            "megabytes": sum(each.num_bytes for each in work) / 1e6,
            "gigaflops": sum(each.num_operations for each in work) / 1e9,
        }


def attention_work(c: DeepseekConfig, step: Step) -> list[Work]:
    """Return the projections, the expansions of latents, and attention itself."""
    sizes, num = c.sizes, step.num_tokens
    entry = sizes.latent_size + sizes.rope_size
    head, value = sizes.nope_size + sizes.rope_size, sizes.value_size
    assert c.query_rank is not None
    weights = (
        c.hidden_size * (c.query_rank + entry),
        c.query_rank * sizes.num_heads * head,
        sizes.num_heads * value * c.hidden_size,
    )
    projections = [Work(each, 2 * num * each) for each in weights]
    up = sizes.num_heads * (sizes.nope_size + value) * sizes.latent_size
    cached = 2 * step.num_rows * step.seq_len * entry  # bytes
    if step.num_queries == 1:  # queries are projected to latents, and results from latents
        pairs = num * sizes.num_heads * step.seq_len
        attention = Work(cached, 2 * pairs * (entry + sizes.latent_size), PEAK)
        expansion = Work(2 * up, 2 * num * up, PEAK)
    else:
        pairs = sizes.num_heads * num * (num + 1) // 2
        attention = Work(cached, 2 * pairs * (head + value), PEAK)
        expansion = Work(2 * up, 2 * step.seq_len * up, PEAK)
    return [*projections, expansion, attention]


def moe_work(c: DeepseekConfig, num_tokens: int, num_used: float) -> list[Work]:
    """Return the router, which computes in float32, the routed experts, and the shared expert."""
    routing = c.moe.routing
    router = c.hidden_size * routing.num_experts
    expert, shared = (
        3 * c.hidden_size * size for size in (c.moe.intermediate_size, c.moe.shared_size)
    )
    return [
        Work(4 * router, 2 * num_tokens * router, PEAK),
        Work(num_used * expert, 2 * num_tokens * routing.top_k * expert),
        Work(shared, 2 * num_tokens * shared),
    ]


def resolved(
    config: Mapping[str, Any], device: str, kernel_backend: Mapping[str, str], *, is_captured: bool
) -> tuple[Resolved, Catalog]:
    """Resolve the settings of a model with FP8 weights. Its steps are captured in CUDA graphs if it `is_captured`."""
    catalog = Catalog.discover()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(config)))
        found = resolve(
            Config.from_keywords(
                model=folder,
                device=device,
                dtype="bfloat16",
                load_format="dummy",
                quantization="fp8-block",
                max_num_seqs=max(DECODES),
                chunked_prefill_size=PREFILL,
                kernel_backend=kernel_backend,
                skip_tokenizer_init=True,
                enforce_eager=not is_captured,
            ),
            catalog,
        )
    limits = replace(found.limits, max_model_len=PREFILL)
    return replace(found, limits=limits), catalog


if __name__ == "__main__":
    main()
