"""Building a model: what its constructor is given, and the kernels that it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tokenspeed_core.errors import CheckpointError, SelectionError
from tokenspeed_core.kernels.attention import AttentionLimits, AttentionProblem
from tokenspeed_core.kernels.plan import KernelPlan
from tokenspeed_core.kernels.select import Choice, Selector
from tokenspeed_core.runner.attention import AttentionGroup, AttentionLayer, BoundKernels
from tokenspeed_core.runner.config import RunnerConfig

_BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The backends of both phases for one layer problem."""

    prefill: Choice
    decode: Choice


class ModelBuild:
    """The `BuildContext` of a model's constructor; afterwards, all that it asked for.

    Kernels other than attention are loaded as they are asked for; attention waits until all layers are
    known, since the block size is decided for all of them together.
    """

    def __init__(self, config: RunnerConfig, device: torch.device, selector: Selector) -> None:
        """Start empty. `device` may be the meta device, to plan without memory."""
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.kv_dtype: torch.dtype = getattr(torch, config.kv_dtype or config.dtype)
        self.device = device
        self.quantization = config.quantization
        self.selector = selector
        self.layers: list[AttentionLayer] = []
        self.groups = {group.name: AttentionGroup() for group in config.model_info.cache_groups}
        self._kv_scales = config.kv_scales
        self._kernels: dict[tuple[str, tuple[tuple[str, Any], ...]], Callable[..., Any]] = {}

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        """Return the selected kernel of an op for a problem, one object for equal problems."""
        key = (op, tuple(sorted(problem.items())))
        if key not in self._kernels:
            choice = self.selector.select(op, problem)
            self._kernels[key] = _unplaced if self.device.type == "meta" else choice.kernel()
        return self._kernels[key]

    def attention(
        self, *, layer: int, num_heads: int, num_kv_heads: int, head_size: int, scale: float,
        window: int | None = None, group: str = "full",
    ) -> AttentionLayer:
        """Register a layer's attention. Raises CheckpointError where `describe` named no such group."""
        if group not in self.groups:
            raise CheckpointError(
                f"layer {layer} wants the cache group {group!r}, and the model's description has "
                f"{', '.join(self.groups) or 'none'}; the family's `describe` and its class disagree"
            )
        index = sum(each.group is self.groups[group] for each in self.layers)
        call = AttentionLayer(
            self.groups[group], index, layer, num_heads, num_kv_heads, head_size, scale, window,
            self._kv_scales[layer] if self._kv_scales else 1.0,
        )
        self.layers.append(call)
        return call

    def problem(self, layer: AttentionLayer, block_size: int, phase: str) -> AttentionProblem:
        """Return a layer's problem in one phase."""
        name, kv_name = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.kv_dtype))
        return AttentionProblem(
            phase=phase, num_heads=layer.num_heads, num_kv_heads=layer.num_kv_heads, head_size=layer.head_size,
            dtype=name, kv_dtype=kv_name, block_size=block_size, scale=layer.scale, window=layer.window,
        )

    def select_attention(self, block_size: int) -> dict[AttentionProblem, AttentionPlan]:
        """Choose the backends of all layers, and of their KV writes, for a block size.

        The keys are the prefill problems. Raises SelectionError.
        """
        plans: dict[AttentionProblem, AttentionPlan] = {}
        for layer in self.layers:
            problem = self.problem(layer, block_size, "prefill")
            plans[problem] = AttentionPlan(
                self.selector.select_attention(problem, layer=layer.layer),
                self.selector.select_attention(replace(problem, phase="decode"), layer=layer.layer),
            )
            self.selector.select("write_kv", _kv_problem(problem), layer=layer.layer)
        return plans

    def bind_attention(
        self, plans: dict[AttentionProblem, AttentionPlan], limits: AttentionLimits, block_size: int
    ) -> None:
        """Build the chosen backends, one per cache group, phase and distinct problem."""
        for layer in self.layers:
            problem = self.problem(layer, block_size, "prefill")
            kernels = layer.group.kernels
            if problem not in kernels:
                plan = plans[problem]
                kernels[problem] = BoundKernels(
                    plan.prefill.spec.factory()(problem, limits, self.device),
                    plan.decode.spec.factory()(replace(problem, phase="decode"), limits, self.device),
                    is_split=plan.prefill.spec != plan.decode.spec,
                )
            layer.bound = kernels[problem]
            layer.write = self.op("write_kv", **_kv_problem(problem))


def solve_block_size(build: ModelBuild, wanted: int | None, scratch: Callable[[], Selector]) -> int:
    """Return the block size at which all layers and phases get the backends that stand first in their order.

    Among equals the smallest of 16, 32, …, since prefixes are shared in whole blocks. A `wanted` size is
    returned as it is. `scratch` makes a selector whose decisions are forgotten. Raises SelectionError with
    the reasons for the first size if none serves.
    """
    if wanted is not None:
        return wanted
    best: tuple[int, int] | None = None
    first_error: SelectionError | None = None
    for size in _BLOCK_SIZES:
        trial = scratch()
        try:
            for layer in build.layers:
                for phase in ("prefill", "decode"):
                    trial.select_attention(build.problem(layer, size, phase))
        except SelectionError as error:
            first_error = first_error or error
            continue
        found = (_rank(trial.plan()), size)
        best = found if best is None else min(best, found)
    if best is None:
        assert first_error is not None
        raise first_error
    return best[1]


def _rank(plan: KernelPlan) -> int:
    """Return how many better-placed candidates the decisions of a plan had to pass over for their block size."""
    return sum(
        any("block_size" in reason.what for reason in verdict.reasons)
        for planned in plan.ops
        for verdict in planned.verdicts[: [each.backend for each in planned.verdicts].index(planned.backend)]
    )


def _kv_problem(problem: AttentionProblem) -> dict[str, Any]:
    axes = ("num_kv_heads", "head_size", "block_size", "kv_dtype", "dtype")
    return {axis: value for axis, value in asdict(problem).items() if axis in axes}


def _unplaced(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("a model on the meta device is a plan and computes nothing")
