"""Weights of a model of transformers: the slots of its tensors, and the names that checkpoints have for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from tokenspeed_core.api import ONE_PROCESS
from tokenspeed_models.layers import ExpertNames, bias_slot
from tokenspeed_models.weights import Groups, Shard, StackedShard, WeightMap, WeightSlot

Named = tuple[str, Tensor]


class CheckpointNames:
    """The parameters and stored buffers of a model, and the way from a checkpoint's tensors to them.

    `original` is the model as transformers builds it: tensors are split by the shapes of its parameters.
    `own` are the slots of TokenSpeed's layers: quantized ones, and experts that processes share. Their names are those
    of checkpoints after renaming: their tensors are neither merged nor split. `shards` has the sharding of linear layers
    by their paths, over the process `groups`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        original: PreTrainedModel,
        own: Sequence[WeightSlot] = (),
        shards: Mapping[str, Shard | StackedShard] | None = None,
        groups: Groups = ONE_PROCESS.group,
    ) -> None:
        self._model, self._original, self._slots = model, original, own
        self._shards, self._groups = shards or {}, groups
        self.targets: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        first: dict[int, str] = {}
        # Tied parameters: all names but the first.
        self._aliases: dict[str, str] = {}
        for name, target in self.targets.items():
            known = first.setdefault(id(target), name)
            if known != name:
                self._aliases[name] = known
        # Inner models have transforms too, and the decoder is taken out of the model later.
        self._transforms = get_model_conversion_mapping(model)
        self._buffers = {name for name, _ in model.named_buffers()}
        self._own = {slot.name for slot in own if not slot.replaces}
        self._own |= {slot.quantization.scale_name for slot in own if slot.quantization is not None}
        # Experts of other processes.
        self._ignored = {slot.name for slot in own if slot.name.endswith(".")}
        names = {*self.targets, *self._own, *(slot.name for slot in own)}
        self._known = dict.fromkeys(names, True)
        self._unexpected = _pattern(model._keys_to_ignore_on_load_unexpected)
        self._optional = _pattern(model._keys_to_ignore_on_load_missing)

    def weight_map(self) -> WeightMap:
        """Return the slots of all parameters, stored buffers and TokenSpeed's layers, under the model's names."""
        plain = (
            self._slot(name, target)
            for name, target in self.targets.items()
            if name not in self._aliases
        )
        return WeightMap((*plain, *self._slots), groups=self._groups)

    def _slot(self, name: str, target: Tensor) -> WeightSlot:
        layer, _, kind = name.rpartition(".")
        shard = self._shards.get(layer)
        if kind == "bias":
            return bias_slot(name, target, shard, self._groups)
        return WeightSlot(name, target, shard, self._kind(name, target))

    def _kind(self, name: str, target: Tensor) -> str:
        """Return the kind of a slot, by which dummy weights are chosen."""
        if name.endswith("bias") or name in self._buffers:
            return "bias"
        return "norm" if target.dim() == 1 else "matrix"

    def converted(self, weights: Iterable[Named]) -> Iterator[Named]:
        """Yield a checkpoint's tensors under the model's names, merged and split as transformers does."""
        renamings = [each for each in self._transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in self._transforms if isinstance(each, WeightConverter)]
        by_pattern = {source: each for each in converters for source in each.source_patterns}
        prefix = self._model.base_model_prefix
        collected: dict[str, list[tuple[str, str, Tensor]]] = {}
        aliases: dict[str, Tensor] = {}
        seen: set[str] = set()
        for source, tensor in weights:
            if self._own:
                name, _ = rename_source_key(source, renamings, [], prefix, self._known)
                # The prefix is not added to names of other processes' experts, which are not known.
                owned = next(filter(self._is_own, (name, f"{prefix}.{name}")), None)
                if owned is not None:
                    yield owned, tensor
                    continue
            name, pattern = rename_source_key(source, renamings, converters, prefix, self._known)
            if name not in self._known and source in self._known:
                name, pattern = source, None
            if name in self._known and pattern is not None:
                collected.setdefault(name, []).append((source, pattern, tensor))
            elif name in self._aliases:
                aliases[self._aliases[name]] = tensor
            elif name in self._known or not self._unexpected.search(name):
                seen.add(name)
                yield name, tensor
        for name, parts in collected.items():
            converter = deepcopy(by_pattern[parts[0][1]])
            for source, pattern, tensor in sorted(parts, key=lambda part: dot_natural_key(part[0])):
                converter.add_tensor(name, source, pattern, tensor)
            for each, value in self._convert(name, converter, parts[0][0], len(parts)):
                seen.add(each)
                yield each, value
        yield from ((name, tensor) for name, tensor in aliases.items() if name not in seen)
        for name in self.targets.keys() - seen - aliases.keys() - self._aliases.keys():
            if name in self._buffers and self._optional.search(name):
                yield name, self.targets[name].clone()

    def _is_own(self, name: str) -> bool:
        """Return whether a tensor belongs to TokenSpeed's layers, those of other processes included."""
        return name in self._own or f"{name.rpartition('.')[0]}." in self._ignored

    def _convert(
        self, name: str, converter: WeightConverter, source: str, num_tensors: int
    ) -> Iterator[Named]:
        """Yield the tensors that a converter returns. Raises ValueError if they do not belong together."""
        try:
            made: Mapping[str, Tensor | list[Tensor]] = converter.convert(
                name, model=self._original, config=self._original.config
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{name} cannot be built from its {num_tensors} tensors, such as {source}: {reason} A tensor is missing "
                "or has the wrong shape. Copy or download the checkpoint again."
            ) from error
        for each, value in made.items():
            yield each, value[0] if isinstance(value, list) else value


def expert_names(model: PreTrainedModel, path: str) -> ExpertNames:
    """Return the names that checkpoints have for the experts of the module at `path`, after renaming.

    Without a transform that merges experts, they are those that most models have.
    """
    stacked = f"{path}.gate_up_proj", f"{path}.down_proj"
    usual = (f"{path}.{{}}.gate_proj", f"{path}.{{}}.up_proj"), (f"{path}.{{}}.down_proj",)
    sources = dict(zip(stacked, usual, strict=True))
    for each in get_model_conversion_mapping(model):
        if not isinstance(each, WeightConverter):
            continue
        for name, layers in sources.items():
            (end, *others) = each.target_patterns
            if not others and name.endswith(end) and len(each.source_patterns) == len(layers):
                start = name.removesuffix(end)
                sources[name] = tuple(
                    f"{start}{source.removesuffix('.weight').replace('*', '{}')}"
                    for source in each.source_patterns
                )
    (gate, up), (down,) = sources.values()
    return ExpertNames(gate, up, down, *stacked)


def _pattern(expressions: Iterable[str] | None) -> re.Pattern[str]:
    """Return a pattern that matches if any of the expressions does."""
    return re.compile("|".join(f"(?:{each})" for each in expressions or ()) or r"(?!)")


def merge(layers: Sequence[nn.Linear], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Allocate one tensor, [sum of outputs, in], for the weights of linear layers, and one for their biases.

    The layers' own parameters become views of it. All of the layers have a bias, or none has.
    """
    weight = _joined(layers, "weight", device)
    return weight, None if layers[0].bias is None else _joined(layers, "bias", device)


def _joined(layers: Sequence[nn.Linear], name: str, device: torch.device) -> Tensor:
    parts: list[Tensor] = [getattr(layer, name) for layer in layers]
    sizes = [len(part) for part in parts]
    joined = parts[0].new_empty(sum(sizes), *parts[0].shape[1:], device=device)
    for layer, part in zip(layers, torch.split_with_sizes(joined, sizes), strict=True):
        setattr(layer, name, nn.Parameter(part, requires_grad=False))
    return joined
