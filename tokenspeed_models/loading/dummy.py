"""Random weights for benchmarks without a checkpoint, generated on the model's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tokenspeed_core.api import Model
from tokenspeed_models.weights import WeightMap, WeightSlot

_SEED = 0
_DEVIATION = 0.02  # a usual initialisation; keeps the activations of deep models finite in float16
# Random e2m1 values have a deviation of about 3, so that this per-tensor scale gives weights of _DEVIATION.
_TENSOR_SCALE = 0.007


def read_dummy(
    path: str, model: Model, report: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield normal weights (or random quantized values), norms of one and biases of zero; the same in every run.

    Raises ValueError if the model has no `weight_map`. `path` is not read.
    """
    weight_map: Callable[[], WeightMap] | None = getattr(model, "weight_map", None)
    if weight_map is None:
        raise ValueError(
            f"--load-format dummy: {type(model).__name__} has no weight_map(). Use another load format."
        )
    slots = list(weight_map())
    done, total = 0, sum(slot.target.nbytes for slot in slots)
    generators: dict[torch.device, torch.Generator] = {}
    for slot in slots:
        device = slot.target.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(_SEED)
        yield slot.name, _fill(slot, generators[device])
        done += slot.target.nbytes
        report(done, total)


def _fill(slot: WeightSlot, generator: torch.Generator) -> torch.Tensor:
    """Return a new tensor of the slot's shape, device and dtype."""
    if slot.make_dummy is not None:
        return slot.make_dummy(generator)
    if slot.kind == "norm":
        return torch.ones_like(slot.target)
    if slot.kind == "bias":
        return torch.zeros_like(slot.target)
    if slot.kind == "scale":
        return torch.full_like(
            slot.target, _TENSOR_SCALE if slot.target.dtype == torch.float32 else 1.0
        )
    if slot.kind == "quantized":
        return torch.randint(
            0,
            256,
            slot.target.shape,
            dtype=slot.target.dtype,
            device=slot.target.device,
            generator=generator,
        )
    weight = torch.empty(slot.target.shape, dtype=slot.dtype, device=slot.target.device)
    return weight.normal_(0.0, _DEVIATION, generator=generator)
