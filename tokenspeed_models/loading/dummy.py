"""Random weights for benchmarks without a checkpoint, generated on the model's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from zlib import crc32

import torch

from tokenspeed_core.api import DraftModel, Model
from tokenspeed_models.weights import WeightMap, WeightSlot

_DEVIATION = 0.02  # a usual initialization; keeps the activations of deep models finite in float16
# Random e2m1 values have a deviation of about 3, so that this per-tensor scale gives weights of _DEVIATION.
_TENSOR_SCALE = 0.007


def read_dummy(
    path: str, model: Model | DraftModel, report: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random weights (or quantized values), with norms of 1 and biases of 0; the same in every run.

    Raises ValueError if the model has no `weight_map`. `path` is not read.
    """
    weight_map: Callable[[], WeightMap] | None = getattr(model, "weight_map", None)
    if weight_map is None:
        raise ValueError(
            f"--load-format dummy: {type(model).__name__} has no weight_map(). Use another load format."
        )
    weights = weight_map()
    slots = list(weights)
    done, total = 0, sum(slot.target.nbytes for slot in slots)
    generators: dict[torch.device, torch.Generator] = {}
    for slot in slots:
        device = slot.target.device
        if device not in generators:
            generators[device] = torch.Generator(device)
        # A seed per name: processes with different experts make the same values for the weights that they share.
        generators[device].manual_seed(crc32(slot.name.encode()))
        yield slot.name, _fill(slot, slot.shape(weights.groups), generators[device])
        done += slot.target.nbytes
        report(done, total)


def _fill(slot: WeightSlot, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return a new tensor of a shape for a slot, on its device and of its dtype."""
    target, dtype = slot.target, slot.target.dtype
    if slot.make_dummy is not None:
        return slot.make_dummy(shape, generator)
    if slot.kind == "norm":
        return target.new_ones(shape)
    if slot.kind == "bias":
        return target.new_zeros(shape)
    if slot.kind == "scale":
        return target.new_full(shape, _TENSOR_SCALE if dtype == torch.float32 else 1.0)
    if slot.kind == "quantized":
        return torch.randint(0, 256, shape, dtype=dtype, device=target.device, generator=generator)
    weight = torch.empty(shape, dtype=slot.dtype, device=target.device)
    return weight.normal_(0.0, _DEVIATION, generator=generator)
