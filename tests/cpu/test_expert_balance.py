"""Experts that move between processes: the same tokens before, during and after a move."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from balanced_layers import INTERVAL, NUM_STEPS, PREPARED, SIZES, run_layers
from process_pool import ProcessPool, RankBuild, Sizes
from test_lockstep import UNEVEN, alone, prompt, together, tokens
from test_quantization_parallel import FORMS, scheme_of

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import ExpertBalance, MovableExperts
from tokenspeed_core.config.schema import read_keywords
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.executor.expert_placement import NUM_TURNS, place_table, turn_table
from tokenspeed_core.worker.expert_balancer import READ_LAG, ExpertBalancer
from tokenspeed_models.layers.experts import Experts


@cache
def with_fixed_experts(pool: ProcessPool, sizes: Sizes, form: str | None) -> Any:
    """Run the layers of `run_layers` without moves."""
    return pool.run(run_layers, sizes, None, form)


@pytest.mark.parametrize(
    ("sizes", "num_redundant", "form"),
    [
        (Sizes(experts=2), 0, None),
        (Sizes(experts=2), 4, None),
        (Sizes(experts=4), 0, None),
        (Sizes(experts=4), 4, None),
        (Sizes(moe=2, experts=2), 4, None),
        (Sizes(experts=2), 4, PREPARED),
        (Sizes(experts=2), 2, "fp8 per channel"),
        (Sizes(experts=2), 2, "fp8 blocks"),
        (Sizes(experts=2), 2, "mxfp8"),
        (Sizes(experts=2), 2, "mxfp4"),
        (Sizes(experts=2), 2, "awq"),
        (Sizes(experts=2), 2, "gptq"),
        (Sizes(experts=2), 2, "gpt-oss"),
        (Sizes(moe=2, experts=2), 4, "gpt-oss"),
        (Sizes(experts=2), 2, "gpt-oss in MXFP4"),
    ],
    ids=str,
)
def test_sum_of_all_processes_is_the_same_after_moves(
    pool: ProcessPool, sizes: Sizes, num_redundant: int, form: str | None
) -> None:
    ranks = pool.run(run_layers, sizes, num_redundant, form)
    static = with_fixed_experts(pool, sizes, None if form == PREPARED else form)
    for step in range(NUM_STEPS):
        for layer in range(2):
            found, expected = (
                torch.stack([outputs[step][layer] for outputs, _, _ in each]).sum(0)
                for each in (ranks, static)
            )
            assert expected.abs().sum() > 0
            bound = 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(found, expected, atol=bound, rtol=1e-4)
    _, placements, num_moves = ranks[0]
    assert num_moves > 0
    for _, others, _ in ranks:
        for mine, theirs in zip(placements, others, strict=True):
            assert (mine == theirs).all()
    has_replicas = all((np.bincount(each.flatten()) > 1).any() for each in placements)
    assert has_replicas == bool(num_redundant)


@pytest.mark.parametrize(
    ("num_redundant", "backend", "tp"),
    [
        (4, "torch", 1),
        (0, "alltoall", 1),
        pytest.param(0, "torch", 1, marks=pytest.mark.release),
        pytest.param(4, "alltoall", 1, marks=pytest.mark.release),
        pytest.param(4, "torch", 2, marks=pytest.mark.release),
        pytest.param(4, "alltoall", 2, marks=pytest.mark.release),
    ],
)
def test_engines_generate_the_tokens_of_one_process_while_experts_move(
    pool: ProcessPool, num_redundant: int, backend: str, tp: int
) -> None:
    settings = {
        "all2all_backend": (backend,),
        "enable_eplb": True,
        "num_redundant_experts": num_redundant,
        "eplb_interval": INTERVAL,
    }
    first, second = together(pool, "demo-deepseek", UNEVEN, tp=tp, **settings)
    assert [tokens(first), tokens(second)] == alone("demo-deepseek", UNEVEN)
    assert first.num_moves == second.num_moves > 0


@pytest.mark.slow
@pytest.mark.release
def test_ranks_of_an_engine_generate_the_tokens_of_one_process_while_experts_move() -> None:
    prompts: Sequence[Sequence[int]] = [prompt(20, 1), prompt(3, 2)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    settings: dict[str, Any] = {
        "model": "demo-deepseek",
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_memory": "4MB",
        "skip_tokenizer_init": True,
        "max_model_len": 96,
    }
    balanced = {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "num_redundant_experts": 2,
        "eplb_interval": INTERVAL,
    }
    found = []
    for more in ({}, balanced):
        with LLM(**settings, **more) as llm:
            runner: Any = llm._engine.runner
            requests = [{"prompt_token_ids": each} for each in prompts]
            found.append([each.outputs[0].token_ids for each in llm.generate(requests, params)])
    assert found[0] == found[1]
    assert runner._runner._balancer.num_moves > 0


def test_loads_count_the_chosen_experts() -> None:
    build = RankBuild(Sizes(experts=2).layout(1))
    balance = build.expert_balance = ExpertBalance(2, NUM_TURNS)
    layer = Experts(build, **SIZES)
    (movable,) = balance.layers
    assert movable.num_slots == 5 and layer.gate_up.shape[0] == 5
    ids = torch.tensor([[1, 5], [5, 7], [0, 5]], dtype=torch.int32)
    assert layer.local.choose(ids).tolist() == [[5, 1], [1, 3], [5, 1]]
    assert movable.loads.tolist() == [1, 1, 0, 0, 0, 3, 0, 1]
    # Expert 5 has a replica on the other process: they take turns by the index of the token.
    placement = np.asarray([[0, 1, 2, 3, 5], [4, 5, 6, 7, -1]], np.int32)
    movable.table.copy_(torch.from_numpy(turn_table(placement, 1, 8)))
    assert layer.local.choose(ids).tolist() == [[5, 5], [1, 3], [5, 5]]


def test_routed_tokens_go_to_the_replicas_in_turn() -> None:
    build = RankBuild(Sizes(experts=2, data=2).layout(1))
    build.routes_tokens = True
    balance = build.expert_balance = ExpertBalance(2, NUM_TURNS)
    layer = Experts(build, **SIZES)
    (movable,) = balance.layers
    ids = torch.tensor([[1, 5], [5, 7], [0, 5]], dtype=torch.int32)
    # Each process has five places, the last of which is for a replica.
    assert layer.local.owners().tolist() == [0] * 5 + [1] * 5
    assert layer.local.places(ids).tolist() == [[1, 6], [6, 8], [0, 6]]
    assert movable.loads.tolist() == [1, 1, 0, 0, 0, 3, 0, 1]
    placement = np.asarray([[0, 1, 2, 3, 5], [4, 5, 6, 7, -1]], np.int32)
    movable.table.copy_(torch.from_numpy(place_table(placement, 8)))
    assert layer.local.places(ids).tolist() == [[1, 4], [6, 8], [0, 4]]
    places = torch.tensor([[6, 4], [8, 5]], dtype=torch.int32)
    assert layer.local.choose(places).tolist() == [[1, 5], [3, 0]]


@pytest.mark.parametrize("is_balanced", [False, True])
def test_padding_tokens_use_no_expert(is_balanced: bool) -> None:
    build = RankBuild(Sizes(experts=2, data=2).layout(1))
    balance = ExpertBalance(0, NUM_TURNS)
    build.expert_balance = balance if is_balanced else None
    layer = Experts(build, **SIZES)
    ids = torch.tensor([[1, 5], [5, 7], [0, 5], [4, 6]], dtype=torch.int32)
    build.token_counts.padding = torch.tensor([False, True, True, False])
    assert layer.local.choose(ids).tolist() == [[4, 1], [4, 4], [4, 4], [0, 2]]
    for each in balance.layers:
        assert each.loads.tolist() == [0, 1, 0, 0, 1, 1, 1, 0]
    build.token_counts.padding = None
    assert layer.local.choose(ids).tolist() == [[4, 1], [1, 3], [4, 1], [0, 2]]


def test_log_shows_the_loads_of_layers_that_are_balanced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    balance = ExpertBalance(0, NUM_TURNS)
    for _ in range(3):
        weights, table = (torch.zeros(2, 4),), torch.zeros(4, NUM_TURNS, dtype=torch.int32)
        balance.layers.append(MovableExperts(2, torch.zeros(4, dtype=torch.int64), weights, table))
    handles = {"world": None, "experts": None}
    balancer = ExpertBalancer(balance, Sizes(experts=2).layout(0), handles, INTERVAL)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda loads, group: None)
    caplog.set_level("INFO")
    for layer, loads in zip(
        balance.layers, ([2, 2, 2, 2], [4, 4, 0, 0], [2, 2, 2, 2]), strict=True
    ):
        layer.loads.copy_(torch.tensor(loads))
    for _ in range(INTERVAL + READ_LAG):
        balancer.begin_step()
    assert "1 of 3 layers" in caplog.text
    assert "from 2.00 to 1.00" in caplog.text


def test_model_without_movable_experts_is_refused() -> None:
    layout = Sizes(experts=2).layout(0)
    with pytest.raises(ConfigError, match="--enable-eplb"):
        ExpertBalancer(ExpertBalance(0, NUM_TURNS), layout, {}, INTERVAL)


def test_more_replicas_than_there_can_be_are_refused() -> None:
    build = RankBuild(Sizes(experts=2).layout(0))
    build.expert_balance = ExpertBalance(SIZES["num_experts"] + 2, NUM_TURNS)
    with pytest.raises(ValueError, match="--num-redundant-experts"):
        Experts(build, **SIZES)


def test_experts_that_share_scales_are_refused() -> None:
    build = RankBuild(Sizes(experts=2).layout(0))
    build.expert_balance = ExpertBalance(0, NUM_TURNS)
    build.schemes = scheme_of(FORMS["nvfp4"][0])
    with pytest.raises(ValueError, match=r"--enable-eplb.*share scales"):
        Experts(build, **SIZES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_eplb": True}, "--enable-expert-parallel"),
        ({"num_redundant_experts": 2}, "--enable-eplb"),
        ({"eplb_interval": 10}, "--eplb-interval .* --enable-eplb"),
        (
            {
                "tensor_parallel_size": 2,
                "enable_expert_parallel": True,
                "enable_eplb": True,
                "num_redundant_experts": 3,
            },
            "multiple",
        ),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_keywords("demo-deepseek", settings)
