"""The search for a shared prefix in layers of latent attention: once per forward, for kernels that use the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tokenspeed_core.api.attention import AttentionStep
from tokenspeed_core.api.cache_groups import LatentAttention
from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.api.models import LatentSizes
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.worker.attention import AttentionGroup
from tokenspeed_core.worker.build import ModelBuild
from tokenspeed_core.worker.inputs import GroupInputs
from tokenspeed_core.worker.latent import LatentKernels, LatentLayer
from tokenspeed_core.worker.slots import SHARED_PREFIX, SHARING_ROWS
from tokenspeed_kernels.options import SharedPrefixOptions
from tokenspeed_kernels.reference import cache
from tokenspeed_kernels.reference.cache import (
    MIN_SHARED_TOKENS,
    MIN_SHARING_ROWS,
    find_shared_prefix,
)

NUM_ROWS, BLOCK_SIZE = 9, 64
SIZES = LatentSizes(num_heads=2, latent_size=4, rope_size=2, nope_size=3, value_size=3)
GROUP = LatentAttention("latent", num_layers=2, latent_size=4, rope_size=2)


@pytest.fixture(autouse=True)
def _few_rows_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MIN_SHARED_READS", NUM_ROWS * MIN_SHARED_TOKENS)


class Layers:
    """Two layers of a group, with kernels that record the shared prefix that each decode got."""

    def __init__(self, find: Callable[[Tensor, Tensor], Tensor | None] | None) -> None:
        self.group = AttentionGroup(GROUP)
        self.decoded: list[list[int] | None] = []
        kernels = LatentKernels(
            write=lambda *_: None,
            absorb=lambda q, _: q,
            decode=self._decode,
            project=lambda *_: None,
            prefill=lambda *_: None,
            find_shared=find,
        )
        self.layers = [LatentLayer(self.group, i, i, SIZES, 1.0, 64, 1.0) for i in range(2)]
        for layer in self.layers:
            layer.kernels, layer.caches = kernels, (torch.zeros(1),)

    def _decode(self, *arguments: object) -> None:
        shared = arguments[-1]
        self.decoded.append(shared.tolist()[:2] if isinstance(shared, Tensor) else shared)

    def begin(self, step: AttentionStep) -> None:
        self.group.begin(
            GroupInputs(
                torch.zeros(NUM_ROWS), step, num_decodes=NUM_ROWS, decodes=None, prefills=None
            )
        )

    def forward(self) -> list[list[int] | None]:
        """Run both layers, and return what their decodes got."""
        self.decoded.clear()
        q, other = torch.zeros(NUM_ROWS, 2, 5), torch.zeros(1)
        for layer in self.layers:
            layer(q, other, other, 1e-6, other, other, False, other)
        return list(self.decoded)


def step_of(num_shared: int, shares_prefix: bool = True) -> AttentionStep:
    table = torch.arange(NUM_ROWS * 10, dtype=torch.int32).view(NUM_ROWS, 10)
    table[:, : num_shared // BLOCK_SIZE] = table[0, : num_shared // BLOCK_SIZE]
    return AttentionStep(
        num_rows=NUM_ROWS,
        num_tokens=NUM_ROWS,
        max_num_query=1,
        max_seq_len=640,
        query_start=torch.arange(NUM_ROWS + 1, dtype=torch.int32),
        seq_lens=torch.full((NUM_ROWS,), 600, dtype=torch.int32),
        block_table=table,
        host_query_start=None,
        host_seq_lens=None,
        shares_prefix=shares_prefix,
    )


def test_each_forward_searches_once() -> None:
    assert SHARED_PREFIX <= MIN_SHARED_TOKENS
    assert SHARING_ROWS <= MIN_SHARING_ROWS
    search, num_searches = find_shared_prefix({"block_size": BLOCK_SIZE}), 0

    def find(block_table: Tensor, seq_lens: Tensor) -> Tensor | None:
        nonlocal num_searches
        num_searches += 1
        return search(block_table, seq_lens)

    layers, step = Layers(find), step_of(320)
    layers.begin(step)
    assert layers.forward() == [[320, 0]] * 2
    # A second forward without `begin`, like a capture after a warm-up.
    step.block_table[3, 4] = 99
    assert layers.forward() == [[256, 0]] * 2
    assert num_searches == 2
    other = step_of(0)
    layers.begin(other)
    assert layers.forward() == [[0, 0]] * 2
    assert num_searches == 3


def test_first_layer_of_a_forward_need_not_be_the_first_of_the_group() -> None:
    layers = Layers(find_shared_prefix({"block_size": BLOCK_SIZE}))
    layers.begin(step_of(320))
    layers.forward()
    layers.layers = layers.layers[1:]  # a draft model's
    layers.begin(step_of(256))
    assert layers.forward() == [[256, 0]]


def test_no_search_if_the_host_rules_out_sharing() -> None:
    layers = Layers(lambda *_: pytest.fail("it was called"))
    layers.begin(step_of(320, shares_prefix=False))
    assert layers.forward() == [None, None]


def test_kernels_without_the_feature_get_no_prefix() -> None:
    layers = Layers(None)
    layers.begin(step_of(320))
    assert layers.forward() == [None, None]


@pytest.mark.parametrize(
    ("platform", "backend"), [(PlatformInfo("cuda", (9, 0)), "triton"), (PlatformInfo("cpu"), None)]
)
def test_search_is_selected_for_kernels_with_the_feature(
    tiny: Callable[..., Resolved], platform: PlatformInfo, backend: str | None
) -> None:
    resolved = tiny()
    info = replace(resolved.checkpoint.info, cache_groups=(GROUP,))
    changed = replace(resolved, checkpoint=replace(resolved.checkpoint, info=info))
    catalog = Catalog.discover()
    selector = Selector(
        installed_kernels(catalog),
        platform,
        ops=installed_ops(catalog),
        module_exists=lambda name: name == "triton",
        options={"triton.shared_prefix": "false"},
    )
    build = ModelBuild(changed, torch.device("meta"), selector)
    layer = build.latent_attention(layer=0, sizes=SIZES, scale=1.0)
    chosen = {each.spec.op: each for each in build.select_latent(selector, layer, 64)}
    found = chosen.get("find_shared_prefix")
    assert (found and found.spec.backend) == backend
    assert found is None or found.options == SharedPrefixOptions(shared_prefix=False)


class Planned:
    """A decode kernel that plans a step, and records what its calls got."""

    def __init__(self) -> None:
        self.num_plans = 0
        self.got: list[object] = []

    def __call__(self, *arguments: object) -> None:
        self.got.append(arguments[-1])

    def plan(self) -> object:
        self.num_plans += 1
        return self.num_plans


def test_a_kernel_plans_each_forward_once() -> None:
    layers, kernel = Layers(None), Planned()
    for layer in layers.layers:
        layer.kernels = replace(layer.kernels, decode=kernel)
    layers.begin(step_of(320))
    for _ in range(2):
        layers.forward()
    assert kernel.got == [1, 1, 2, 2]


def test_layers_with_other_kernels_do_not_get_the_plan() -> None:
    layers, kernel = Layers(None), Planned()
    first, _ = layers.layers  # the second one is a draft model's
    first.kernels = replace(first.kernels, decode=kernel)
    layers.begin(step_of(320))
    for _ in range(2):
        assert layers.forward() == [None]
    assert kernel.got == [1, 2]
