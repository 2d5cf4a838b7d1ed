"""A layer's attention must match the cache group that its family declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tokenspeed_core.api.cache_groups import (
    CacheGroupSpec,
    CachePart,
    FullAttention,
    SlidingWindow,
    values_per_token,
)
from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.worker.attention import AttentionGroup, bind_arena
from tokenspeed_core.worker.build import ModelBuild

Make = Callable[..., Resolved]
FULL = FullAttention("full", num_layers=2, num_kv_heads=2, head_size=16)
WINDOW = SlidingWindow("window", num_layers=2, num_kv_heads=2, head_size=16, window=32)


def make_build(resolved: Resolved, *groups: CacheGroupSpec) -> ModelBuild:
    info = replace(resolved.checkpoint.info, cache_groups=groups)
    changed = replace(resolved, checkpoint=replace(resolved.checkpoint, info=info))
    return ModelBuild(changed, torch.device("meta"), Selector((), PlatformInfo("cpu")))


def attend(build: ModelBuild, layer: int, **changes: Any) -> None:
    call = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "scale": 0.25} | changes
    build.attention(layer=layer, **call)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window": None}, ("window None", "32")),
        ({"window": 33}, ("window 33", "32")),
        ({"window": 32, "num_kv_heads": 4}, ("k [4, 16]", "k [2, 16]")),
        ({"window": 32, "head_size": 32}, ("k [2, 32]", "k [2, 16]")),
        ({"window": 32, "group": "other"}, ("'other'", "window")),
    ],
)
def test_layer_that_contradicts_its_group_is_refused(
    tiny: Make, changes: dict[str, Any], named: tuple[str, str]
) -> None:
    build = make_build(tiny(), WINDOW)
    with pytest.raises(CheckpointError) as caught:
        attend(build, 7, **{"group": "window", **changes})
    assert all(part in str(caught.value) for part in ("Qwen3ForCausalLM", "layer 7", *named))


@pytest.mark.parametrize("window", [32, 8])
def test_layer_within_its_window_is_accepted(tiny: Make, window: int) -> None:
    attend(make_build(tiny(), WINDOW), 0, window=window, group="window")


def test_window_in_a_full_group_is_accepted(tiny: Make) -> None:
    attend(make_build(tiny(), FULL), 0, window=8)


def test_number_of_layers_must_equal_the_groups(tiny: Make) -> None:
    build = make_build(tiny(), FULL)
    attend(build, 0)
    with pytest.raises(CheckpointError, match="'full' declares 2 layers, and 1"):
        build.check_groups()
    attend(build, 1)
    build.check_groups()
    with pytest.raises(CheckpointError, match=r"layer 2 .*'full'"):
        attend(build, 2)


def test_layer_of_another_kind_than_its_group_is_refused(tiny: Make) -> None:
    @dataclass(frozen=True)
    class Latent(FullAttention):
        @property
        def parts(self) -> tuple[CachePart, ...]:
            return (CachePart("latent", (self.head_size,)),)

    build = make_build(tiny(), Latent("full", 2, 2, 16))
    with pytest.raises(CheckpointError, match=r"k \[2, 16\].* latent \[16\]"):
        attend(build, 0)


def test_parts_of_layers_fill_a_block_without_overlap() -> None:
    blocks, size = 3, 2
    groups = [AttentionGroup(FULL), AttentionGroup(WINDOW)]
    layers = [Mock(group=group, index=index) for group in groups for index in range(2)]
    arena = torch.zeros(blocks, values_per_token(FULL) * size * 4, dtype=torch.uint8)
    bind_arena(layers, arena, size, torch.float32)
    for group in groups:
        own = [layer.caches for layer in layers if layer.group is group]
        for number, (k, v) in enumerate(own):
            assert k.shape == v.shape == (blocks, size, 2, 16)
            k += 2 * number + 1
            v += 2 * number + 2
        values = arena.view(torch.float32).view(blocks, 4, -1)
        expected = torch.tensor([1.0, 2.0, 3.0, 4.0])[None, :, None].expand_as(values)
        assert torch.equal(values, expected)
        arena.zero_()
