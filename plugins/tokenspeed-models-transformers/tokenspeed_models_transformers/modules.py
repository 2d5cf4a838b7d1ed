"""Replaces the computation of modules by TokenSpeed's kernels, where both compute the same.

A module keeps its class and its name; only its `forward` is replaced. Its parameters stay too, unless it is
quantized. Linear layers are known by their class. For all others, a copy of the module with small random weights runs
on the CPU, and is compared with a formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from tokenspeed_core.api import AttentionCall, BuildContext
from tokenspeed_models.layers import ExpertNames, dtype_name
from tokenspeed_models.sharding import Partial, Replicated, Sharded, ShardingSpec
from tokenspeed_models.weights import Shard, StackedShard, WeightSlot
from tokenspeed_models_transformers.compare import (
    MAGNITUDES,
    copied,
    random_linear,
    random_tensor,
    rms_norm_eps,
    same,
)
from tokenspeed_models_transformers.experts import (
    ExpertsLayer,
    MoEKernel,
    fits_kernel,
    library_experts,
)
from tokenspeed_models_transformers.projections import (
    FusedAttention,
    RotaryLayout,
    RotaryTables,
    UsualAttention,
)
from tokenspeed_models_transformers.residual import FusedResidual, passed_arguments
from tokenspeed_models_transformers.stacked import (
    ALL_REDUCE,
    QUANTIZED,
    Layer,
    Stacked,
    Summed,
    plain_gemm,
    stack,
)
from tokenspeed_models_transformers.weights import expert_names

_SMALL = 8  # features of the random inputs of comparisons
_NUM_ROWS = 3


@dataclass(frozen=True, slots=True)
class _Norm:
    norm: Callable[..., Tensor]
    module: Any
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == self.module.weight.dtype:
            return self.norm(x, self.module.weight, self.eps)
        wider: Tensor = type(self.module).forward(self.module, x)
        return wider


@dataclass(frozen=True, slots=True)
class _Linear:
    linear: Callable[..., Tensor]
    module: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        rows = self.linear(x.reshape(-1, module.in_features), module.weight, module.bias)
        return rows.view(*x.shape[:-1], module.out_features)


@dataclass(slots=True)
class GatedMLP:
    """Gate and up projections in one GEMM, `silu_mul`, which may quantize its result, and the down projection."""

    gate_up: Stacked
    silu_mul: Callable[..., Any]
    down: Stacked

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to a tensor of the same shape."""
        return self.down(self.silu_mul(self.gate_up(x.reshape(-1, x.shape[-1])))).view(x.shape)


def find_gated_mlp(module: nn.Module) -> list[str] | None:
    """Return the names of the layers that form gate and up, in this order, of a gated MLP with SiLU."""
    layers = {name: each for name, each in module.named_children() if type(each) is nn.Linear}
    names = set(layers)
    if names == {"gate_proj", "up_proj", "down_proj"}:
        first = ["gate_proj", "up_proj"]
    elif names == {"gate_up_proj", "down_proj"}:
        first = ["gate_up_proj"]
    else:
        return None
    if any(True for _ in module._parameters) or len({layers[n].bias is None for n in first}) > 1:
        return None
    inner, out_size = 6, 6 * 2 // len(first)
    small: dict[str, nn.Linear] = {
        name: random_linear(_SMALL, out_size, seed, bias=layers[name].bias is not None)
        for seed, name in enumerate(first)
    }
    down = random_linear(inner, _SMALL, 5, bias=layers["down_proj"].bias is not None)
    for magnitude in MAGNITUDES:
        x = random_tensor(1, _NUM_ROWS, _SMALL, seed=7) * magnitude
        gate, up = torch.cat([small[name](x) for name in first], dim=-1).chunk(2, dim=-1)
        try:
            found = copied(module, **small, down_proj=down).forward(x)
        except (RuntimeError, TypeError, AttributeError, ValueError):
            return None
        if not same(found, down(functional.silu(gate) * up)):
            return None
    return first


class Replacer:
    """Replaces modules of a model, and counts the replaced and the remaining modules.

    `slots` are the weight slots of quantized layers, and of experts that processes share. The modules of these layers
    lose their parameters. `shards` has the sharding of the other linear layers by their paths, and `sharding` the specs
    of all modules that processes share, in order of computation. Every process computes all other modules.
    """

    def __init__(self, build: BuildContext) -> None:
        self._build = build
        self._tables: dict[RotaryLayout, RotaryTables] = {}
        self.replaced: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.attention: list[FusedAttention] = []
        self.slots: list[WeightSlot] = []
        self.is_quantized = False
        self.shards: dict[str, Shard | StackedShard] = {}
        self.sharding: list[ShardingSpec] = []

    def replace(
        self,
        model: PreTrainedModel,
        attention: Mapping[str, tuple[UsualAttention, AttentionCall]],
        experts: Mapping[str, int],
    ) -> None:
        """Replace all modules that match.

        `attention` has the usual attention modules, `experts` the experts per token of each experts module. Raises
        ValueError if a layer is quantized in a way that it does not support.
        """
        head = model.get_output_embeddings()
        with torch.no_grad():
            for name, module in self._by_layer(model):
                # A subclass may compute more, such as a scale for each token.
                if module is head and type(module) is nn.Linear:
                    self._set(module, "linear layers", self._plain(module))
                elif name in experts:
                    names = expert_names(model, name)
                    self._bind_experts(name, module, experts[name], names)
                elif name in attention:
                    fused = self._fused_attention(name, *attention[name])
                    self._set(module, "attention modules", fused)
                else:
                    self._replace(name, module)

    def _by_layer(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of layer 0, of layer 1, …, then all others, with their paths."""
        layers: dict[int, list[tuple[str, nn.Module]]] = {}
        for name, module in model.named_modules():
            numbers = [int(part) for part in name.split(".") if part.isdigit()]
            layers.setdefault(numbers[0] if numbers else -1, []).append((name, module))
        for layer in self._build.each_layer(max(layers) + 1):
            yield from layers.get(layer, ())
        yield from layers.get(-1, ())

    def _replace(self, name: str, module: Any) -> None:
        if "forward" in vars(module):
            return  # replaced together with the module around it
        dtypes = {parameter.dtype for parameter in module.parameters()}
        fits = dtypes == {self._build.dtype}  # a router, for example, may be float32
        if (passed := passed_arguments(module)) is not None:
            size = len(module.post_attention_layernorm.weight)
            add_norm = self._op("add_rms_norm", size=size)
            self._set(module, "residual additions", FusedResidual.of(module, add_norm, passed))
            return
        if fits and type(module) is nn.Linear:
            self._linear(name, module)
        elif fits and (eps := rms_norm_eps(module)) is not None:
            norm = self._op("rms_norm", size=len(module.weight))
            self._set(module, "RMS norms", _Norm(norm, module, eps))
        elif fits and (first := find_gated_mlp(module)) is not None:
            self._set(module, "gated MLPs", self._gated_mlp(name, module, first))
        elif dtypes and not any(True for _ in module.children()):
            self.left[type(module).__name__] += 1

    def _bind_experts(self, name: str, module: Any, top_k: int, names: ExpertNames) -> None:
        is_plain = self._build.scheme(names.gate.format(0)) is None
        is_shared = any(self._build.group(each).size > 1 for each in ("moe", "experts"))
        fits = module.down_proj.dtype == self._build.dtype and fits_kernel(module)
        if is_shared or not is_plain:
            if not fits:
                what, instead = "is quantized", "Use an unquantized checkpoint"
                if is_plain:
                    what = "is shared by several processes"
                    instead = "Use --moe-tp-size 1, without --enable-expert-parallel"
                raise ValueError(
                    f"{name} ({type(module).__name__}) {what}, but its experts do not compute "
                    f"down(silu(gate(x)) * up(x)). {instead}"
                )
            hidden_size = module.down_proj.shape[1]
            layer = ExpertsLayer(self._build, module, top_k, names)
            module.tokenspeed_experts = layer
            self.slots += layer.slots()
            self.is_quantized |= not is_plain
            self.replaced[
                "mixtures of experts" if is_plain else "quantized mixtures of experts"
            ] += 1

            def bind(all_reduce: Callable[[Tensor], Tensor]) -> None:
                module.tokenspeed_experts = Summed(layer, all_reduce)

            whole, parts = Replicated(), Partial(("moe", "experts"))
            self.sharding.append(ShardingSpec(name, whole, parts, hidden_size, bind))
        elif fits:
            module.tokenspeed_experts = MoEKernel(self._build, module, top_k)
            self.replaced["mixtures of experts"] += 1
        else:
            module.tokenspeed_experts = library_experts(self._build.dtype)
            self.left[type(module).__name__] += 1

    def _fused_attention(
        self, name: str, usual: UsualAttention, attend: AttentionCall
    ) -> FusedAttention:
        tables = None
        if usual.layout is not None:
            tables = self._tables.setdefault(usual.layout, RotaryTables(usual.layout))
        module, local = usual.module, usual.on_one_process(self._build)
        hidden_size, (heads, kv_heads) = module.o_proj.out_features, usual.shards
        shards = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        qkv = self._stack(name, module, shards)
        out = self._stack(name, module, {"o_proj": replace(heads, axis=1)})
        numbers = {
            "num_heads": local.num_heads,
            "num_key_value_heads": local.num_kv_heads,
            "num_key_value_groups": local.num_heads // local.num_kv_heads,
        }
        for attribute, number in numbers.items():
            if hasattr(module, attribute):  # its own forward may read it
                setattr(module, attribute, number)
        for part in module.children():
            # Counted as a part of the module.
            vars(part).setdefault("forward", _unused)
        fused = FusedAttention(usual, attend, tables, qkv, out, local)
        self.attention.append(fused)

        def bind(all_reduce: Callable[[Tensor], Tensor]) -> None:
            fused.add_up(all_reduce)
            vars(module.o_proj)[ALL_REDUCE] = all_reduce

        self._share(name, "heads", "attn", hidden_size, bind)
        return fused

    def _share(
        self, name: str, axis: str, group: str, size: int, bind: Callable[..., None]
    ) -> None:
        """Add the specs of a divided module. Its outputs, of `size` values, are partial sums."""
        between = Sharded(axis, group)
        self.sharding.append(ShardingSpec(f"{name}.in", Replicated(), between, size))
        self.sharding.append(ShardingSpec(f"{name}.out", between, Partial((group,)), size, bind))

    def _set(self, module: Any, kind: str, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self.replaced[kind] += 1

    def _op(self, op: str, **problem: int) -> Callable[..., Any]:
        return self._build.op(op, **problem, dtype=dtype_name(self._build.dtype))

    def _plain(self, module: Any) -> _Linear:
        return _Linear(plain_gemm(self._build, module.in_features, module.out_features), module)

    def _linear(self, name: str, module: nn.Linear) -> None:
        if self._build.scheme(name) is None:
            self._set(module, "linear layers", self._plain(module))
            return
        _, slots = stack(self._build, [Layer(name, module)])
        self.slots += slots
        self.is_quantized = True
        self._set(module, "quantized linear layers", vars(module)[QUANTIZED])

    def _stack(self, name: str, module: Any, parts: Mapping[str, Shard | StackedShard]) -> Stacked:
        """Return one GEMM for linear layers inside a module. The layers' own forwards are no longer used."""
        layers = [
            Layer(f"{name}.{part}", module.get_submodule(part), shard)
            for part, shard in parts.items()
        ]
        stacked, slots = stack(self._build, layers)
        self.slots += slots
        self.is_quantized |= bool(slots)
        for layer in layers:
            vars(layer.module)["forward"] = _unused
            assert layer.shard is not None
            self.shards[layer.path] = layer.shard
        return stacked

    def _gated_mlp(self, name: str, module: Any, first: Sequence[str]) -> GatedMLP:
        scheme, columns = self._build.scheme(f"{name}.down_proj"), Shard(0, "dense")
        silu_mul = "silu_mul" if scheme is None else scheme.fused.get("silu_mul", "silu_mul")
        hidden_size, inner = module.down_proj.out_features, module.down_proj.in_features
        both = columns if len(first) == 2 else StackedShard(((inner, columns), (inner, columns)))
        mlp = GatedMLP(
            gate_up=self._stack(name, module, dict.fromkeys(first, both)),
            silu_mul=self._op(
                silu_mul, size=columns.local_size(f"{name}.down_proj", inner, self._build.group)
            ),
            down=self._stack(name, module, {"down_proj": Shard(1, "dense")}),
        )

        def bind(all_reduce: Callable[[Tensor], Tensor]) -> None:
            mlp.down = Summed(mlp.down, all_reduce)
            vars(module.down_proj)[ALL_REDUCE] = all_reduce

        self._share(name, "features", "dense", hidden_size, bind)
        return mlp


def _unused(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("the surrounding module is replaced")
