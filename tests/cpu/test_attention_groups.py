"""A layer's attention must match the cache group that its family declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_core.api.cache_groups import (
    CacheGroupSpec,
    CachePart,
    FullAttention,
    LatentAttention,
    SlidingWindow,
)
from tokenspeed_core.api.kernels import PHASES, PlatformInfo
from tokenspeed_core.api.models import LatentSizes
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.kv_cache.page_layout import PageLayout
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.worker.attention import AttentionGroup, bind_arena
from tokenspeed_core.worker.build import ModelBuild

Make = Callable[..., Resolved]
FULL = FullAttention("full", num_layers=2, num_kv_heads=2, head_size=16)
WINDOW = SlidingWindow("window", num_layers=2, num_kv_heads=2, head_size=16, window=32)

WIDE_WINDOW = SlidingWindow("wide", num_layers=5, num_kv_heads=2, head_size=16, window=32)


def make_build(resolved: Resolved, *groups: CacheGroupSpec, **changes: Any) -> ModelBuild:
    info = replace(resolved.checkpoint.info, cache_groups=groups, **changes)
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
        ({"window": 32, "value_head_size": 8}, ("v [2, 8]", "v [2, 16]")),
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
    with pytest.raises(CheckpointError, match=r"'full' declares 2 layers, but 1"):
        build.check_groups({})
    attend(build, 1)
    build.check_groups({})
    with pytest.raises(CheckpointError, match=r"layer 2 .*'full'"):
        attend(build, 2)


def test_wrong_number_of_draft_layers_names_the_drafter(tiny: Make) -> None:
    build = make_build(tiny(), replace(FULL, num_layers=4))
    draft = build.for_draft_model(
        "drafters acme of acme 1.0", 2, {"all": "full"}, is_quantized=False
    )
    attend(build, 0)
    with pytest.raises(CheckpointError, match=r"Qwen3ForCausalLM.* declares 2 layers, but 1"):
        build.check_groups({"full": 2})
    attend(build, 1)
    build.check_groups({"full": 2})
    attend(draft, 0, group="all")
    with pytest.raises(CheckpointError, match=r"drafters acme .*but 3 use it.*DraftModelInfo"):
        draft.check_groups({})
    attend(draft, 1, group="all")
    draft.check_groups({})
    with pytest.raises(CheckpointError, match=r"drafters acme .*5 or more layers.*DraftModelInfo"):
        attend(draft, 2, group="all")


def test_layer_of_another_kind_than_its_group_is_refused(tiny: Make) -> None:
    @dataclass(frozen=True)
    class Latent(FullAttention):
        @property
        def parts(self) -> tuple[CachePart, ...]:
            return (CachePart("latent", (self.head_size,)),)

    build = make_build(tiny(), Latent("full", 2, 2, 16))
    with pytest.raises(CheckpointError, match=r"k \[2, 16\].* latent \[16\]"):
        attend(build, 0)


def test_bidirectional_layer_of_a_causal_model_is_refused(tiny: Make) -> None:
    with pytest.raises(CheckpointError, match="layer 1 is bidirectional"):
        attend(make_build(tiny(), FULL), 1, is_bidirectional=True)


def test_only_plain_prompts_are_bidirectional(tiny: Make) -> None:
    latent = LatentAttention("latent", num_layers=1, latent_size=20, rope_size=12)
    build = make_build(tiny(), FULL, latent, is_bidirectional=True)
    attend(build, 0, is_bidirectional=True)
    (layer,) = build.layers
    problems = {phase: layer.problem(phase=phase, block_size=16) for phase in PHASES}
    assert {phase: each.is_bidirectional for phase, each in problems.items()} == {
        "prefill": True,
        "decode": False,
    }
    with pytest.raises(CheckpointError, match="layer 1 is both chunked and bidirectional"):
        attend(build, 1, is_bidirectional=True, is_chunked=True, window=8)
    with pytest.raises(CheckpointError, match="layer 0: latent attention"):
        build.latent_attention(layer=0, sizes=LatentSizes(4, 20, 12, 8, 8), scale=1.0)


def test_layers_own_the_bytes_of_their_blocks() -> None:
    pages, size = 3, 2
    latent = LatentAttention("latent", num_layers=3, latent_size=20, rope_size=12)
    specs = (FULL, WIDE_WINDOW, latent)
    layout = PageLayout.of(specs, size, 4)
    layers = [
        Mock(group=AttentionGroup(spec), index=index)
        for spec in specs
        for index in range(spec.num_layers)
    ]
    arena = torch.zeros(pages, layout.page_bytes, dtype=torch.uint8)
    bind_arena(layers, arena, layout, torch.float32)
    for spec, group in zip(specs, layout.groups, strict=True):
        own = [part for layer in layers if layer.group.spec is spec for part in layer.caches]
        owners = torch.zeros(pages * group.blocks_per_page, group.stride // 4)
        for number, part in enumerate(own, 1):
            assert part.shape[:2] == (pages * group.blocks_per_page, size)
            assert part.shape[2:] == spec.parts[(number - 1) % len(spec.parts)].shape
            part += number
        # Each part fills the next bytes of every block.
        at = 0
        for number, part in enumerate(own, 1):
            end = at + part[0].numel()
            owners[:, at:end] = number
            at = end
        assert at * 4 == group.block_bytes
        assert torch.equal(arena.view(torch.float32).view_as(owners), owners)
        arena.zero_()


HEADS = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40))  # K, D, V


@settings(max_examples=25, deadline=None)
@given(st.lists(HEADS, min_size=1, max_size=3), st.integers(1, 3), st.sampled_from([8, 16]))
def test_keys_and_values_of_unequal_size_fill_their_blocks(
    shapes: list[tuple[int, int, int]], num_layers: int, block_size: int
) -> None:
    groups = [
        FullAttention(f"full_{index}", num_layers, heads, size, value_size)
        for index, (heads, size, value_size) in enumerate(shapes)
    ]
    layout = PageLayout.of(groups, block_size, 2)
    arena = torch.zeros((2, layout.page_bytes), dtype=torch.uint8)
    for group, placed, (heads, size, value_size) in zip(groups, layout.groups, shapes, strict=True):
        per_token = num_layers * heads * (size + value_size)
        assert placed.block_bytes == block_size * per_token * 2
        layers = [
            Mock(group=AttentionGroup(group), index=index, caches=()) for index in range(num_layers)
        ]
        bind_arena(layers, arena, layout, torch.int16)
        caches = [cache for layer in layers for cache in layer.caches]
        wanted = [(block_size, heads, each) for each in (size, value_size)] * num_layers
        assert [cache.shape[1:] for cache in caches] == wanted
        arena.zero_()
        for number, cache in enumerate(caches, start=1):
            cache.fill_(number)
        # No two overlap, and together they are all bytes of their blocks.
        assert all((cache == number).all() for number, cache in enumerate(caches, start=1))
        num_blocks = caches[0].shape[0]
        assert int((arena.view(torch.int16) != 0).sum()) == num_blocks * block_size * per_token
