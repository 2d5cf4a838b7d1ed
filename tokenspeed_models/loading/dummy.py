"""Random weights of a model's shapes, made on its own device: for measuring without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tokenspeed_core.api import Model
from tokenspeed_models.weights import WeightMap, WeightSlot

_SEED = 0
_DEVIATION = (
    0.02  # keeps activations of deep models finite in float16, as trained initialisations do
)
_FACTOR = 0.007  # over all values of an operand: random codes of e2m1, of deviation 3, become weights of _DEVIATION


def read_dummy(
    path: str, model: Model, report: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield normal weights (or random codes), norms of one, biases of zero; the same values in every run on a device.

    Raises ValueError if the model shows no weight map. `path` is not read.
    """
    weight_map: Callable[[], WeightMap] | None = getattr(model, "weight_map", None)
    if weight_map is None:
        raise ValueError(
            f"{type(model).__name__} has no weight_map() to take shapes from, so load format "
            "dummy cannot fill it; use its checkpoint"
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
    """Return one weight, new, of the slot's shape and device, in the type that it takes."""
    if slot.kind == "norm":
        return torch.ones_like(slot.target)
    if slot.kind == "bias":
        return torch.zeros_like(slot.target)
    if slot.kind == "scale":
        return torch.full_like(slot.target, _FACTOR if slot.target.dtype == torch.float32 else 1.0)
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
