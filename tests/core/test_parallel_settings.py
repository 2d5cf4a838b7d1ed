"""The flags of an engine with several processes, and the process groups that they define."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from tokenspeed_core.config import Config
from tokenspeed_core.config.sources import load
from tokenspeed_core.errors import ConfigError

SHARED = {"data_parallel_size": 2, "enable_expert_parallel": True}


def sizes(**keywords: Any) -> tuple[int, ...]:
    found = Config.from_keywords(**keywords).parallel_sizes()
    return found.attn, found.dense, found.moe, found.experts, found.world_size


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, (1, 1, 1, 1, 1)),
        ({"tensor_parallel_size": 2}, (2, 2, 2, 1, 2)),
        ({"tp": 4, "ep_size": 2}, (4, 4, 2, 2, 4)),
        ({"tp": 4, "enable_expert_parallel": True}, (4, 4, 1, 4, 4)),
        ({"tp": 2, "dense_tp_size": 1}, (2, 1, 2, 1, 2)),
        ({"tp": 4, "dense_tp_size": 2}, (4, 2, 4, 1, 4)),
        ({"tp": 4, "moe_tp_size": 2, "expert_parallel_size": 2}, (4, 4, 2, 2, 4)),
        ({"world_size": 2, "attn_tp_size": 1}, (1, 2, 2, 1, 2)),
        ({"nprocs_per_node": 2, "nnodes": 2, "dist_init_addr": "a:1"}, (4, 4, 4, 1, 4)),
        ({**SHARED, "tp": 2}, (2, 2, 1, 4, 2)),
        ({**SHARED, "tp": 2, "attn_tp_size": 1}, (1, 2, 1, 4, 2)),
        ({**SHARED, "tp": 4, "moe_tp_size": 4, "ep_size": 2}, (4, 4, 4, 2, 4)),
        ({**SHARED, "tp": 4, "dense_tp_size": 2}, (4, 2, 1, 8, 4)),
        ({**SHARED, "world_size": 4}, (4, 4, 1, 8, 4)),
        ({"data_parallel_size": 2, "tp": 2, "ep_size": 2}, (2, 2, 1, 2, 2)),
    ],
)
def test_missing_sizes_are_derived(keywords: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert sizes(**keywords) == expected


@pytest.mark.parametrize(
    ("keywords", "names"),
    [
        (
            {"tp": 4, "attn_tp_size": 2},
            ["--tensor-parallel-size 4 --attn-tp-size 2:", "Attention TP", "not 2"],
        ),
        (
            {"tp": 2, "ep_size": 3},
            ["--tensor-parallel-size 2 --expert-parallel-size 3:", "3 processes"],
        ),
        (
            {"tp": 2, "moe_tp_size": 2, "ep_size": 2},
            ["--tensor-parallel-size 2 --moe-tp-size 2 --expert-parallel-size 2:"],
        ),
        (
            {"tp": 2, "ep_size": 3, "enable_expert_parallel": True},
            ["--tensor-parallel-size 2 --expert-parallel-size 3 --enable-expert-parallel:"],
        ),
        ({"tp": 1, "world_size": 2}, ["--tensor-parallel-size 1 --world-size 2:"]),
        ({"tp": 2, "attn_tp_size": 4}, ["--tensor-parallel-size 2 --attn-tp-size 4:"]),
        ({"tp": 4, "world_size": 2}, ["--tensor-parallel-size 4 --world-size 2:"]),
        ({"tp": 3, "nnodes": 2, "dist_init_addr": "a:1"}, ["3 processes", "--nprocs-per-node"]),
        ({"nnodes": 2, "dist_init_addr": "a:1"}, ["one process", "--nprocs-per-node"]),
        (
            {"enable_expert_parallel": True},
            ["--enable-expert-parallel", "one process", "--tensor-parallel-size"],
        ),
        ({"world_size": 4, "nprocs_per_node": 2}, ["--world-size", "--nnodes"]),
        ({"tp": 2, "nnodes": 2}, ["--dist-init-addr"]),
        ({**SHARED, "moe_tp_size": 2, "enable_eplb": True}, ["remove --moe-tp-size 2"]),
        ({"tp": 2, "nprocs_per_node": 1}, ["--tensor-parallel-size must be 1."]),
        ({"tp": 2, "dist_init_addr": "a:1"}, ["--nnodes"]),
        *(
            ({"tp": 2, "nnodes": 2, "dist_init_addr": address}, ["--dist-init-addr", part])
            for address, part in (("a", "HOST:PORT"), (":1", "HOST:PORT"), ("0.0.0.0:1", "0.0.0.0"))
        ),
        ({"tp": 2, "node_rank": 1}, ["--nnodes"]),
        ({"tp": 4, "ep_size": 2, "enable_expert_parallel": True}, ["--expert-parallel-size"]),
        ({"distributed_executor_backend": "ray"}, ["--tensor-parallel-size"]),
        ({"distributed_executor_backend": "ray", "tp": 2, "node_rank": 1, "nnodes": 2}, ["ray"]),
        ({"tp": 0}, ["tensor_parallel_size"]),
        ({**SHARED, "tp": 2, "ep_size": 2}, ["makes --expert-parallel-size 4"]),
        ({**SHARED, "tp": 2, "moe_tp_size": 3}, ["--moe-tp-size 3", "2 engines", "4 processes"]),
        (
            {**SHARED, "attn_tp_size": 4, "dense_tp_size": 3},
            ["--attn-tp-size 4 --dense-tp-size 3", "Dense TP must divide 4"],
        ),
        (
            {**SHARED, "nnodes": 2, "dist_init_addr": "a:1"},
            ["--data-parallel-size", "remove --nnodes"],
        ),
        (
            {**SHARED, "tp": 2, "distributed_executor_backend": "ray"},
            ["--distributed-executor-backend ray"],
        ),
        *(
            (
                {"all2all_backend": "alltoall", **sizes},
                ["--all2all-backend", "--data-parallel-size", "--enable-expert-parallel"],
            )
            for sizes in ({}, {"tp": 2, "ep_size": 2}, {"data_parallel_size": 2})
        ),
        ({"enable_allreduce_fusion": True}, ["--enable-allreduce-fusion"]),
        (
            {**SHARED, "enable_allreduce_fusion": True},
            ["--enable-allreduce-fusion"],
        ),
        (
            {"tp": 2, "comm_fusion_max_num_tokens": 8, "enable_allreduce_fusion": False},
            ["--comm-fusion-max-num-tokens", "--no-enable-allreduce-fusion"],
        ),
        ({"comm_fusion_max_num_tokens": 8}, ["--comm-fusion-max-num-tokens", "--tensor-parallel"]),
    ],
)
def test_contradictions_are_refused_in_one_line(keywords: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_keywords(**keywords)
    assert all(name in str(caught.value) for name in names), caught.value
    assert "\n" not in str(caught.value)


# Sizes of --attn-tp-size, --dense-tp-size, --moe-tp-size and --ep-size.
COMBINATIONS = list(product((None, 1, 2, 4), repeat=4))


@pytest.mark.parametrize("is_expert_parallel", [False, True])
@pytest.mark.parametrize("given", COMBINATIONS, ids=str)
def test_divisors_of_tp_give_a_plan_or_name_the_flags(
    given: tuple[int | None, ...], is_expert_parallel: bool
) -> None:
    names = ("attn_tp_size", "dense_tp_size", "moe_tp_size", "expert_parallel_size")
    keywords = {name: size for name, size in zip(names, given, strict=True) if size}
    attn, dense, moe, experts = given
    attn, dense = attn or 4, dense or 4
    if is_expert_parallel:
        moe = moe or 1
        fits = 4 // moe > 1 and experts in (None, 4 // moe)
        experts = 4 // moe
    else:
        experts = experts or 1
        moe = moe or 4 // experts
        fits = moe * experts in (1, 4)
    fits = fits and attn != 2 and 4 in (attn, dense, moe * experts)
    if fits:
        found = sizes(tp=4, enable_expert_parallel=is_expert_parallel, **keywords)
        assert found == (attn, dense, moe, experts, 4)
        return
    with pytest.raises(ConfigError) as caught:
        sizes(tp=4, enable_expert_parallel=is_expert_parallel, **keywords)
    flags = [f"--{name.replace('_', '-')} {size}" for name, size in keywords.items()]
    flags += ["--enable-expert-parallel"] * is_expert_parallel
    assert str(caught.value).startswith(" ".join(["--tensor-parallel-size 4", *flags]) + ": ")
    assert "\n" not in str(caught.value)


def test_missing_expert_parallel_size_is_suggested() -> None:
    with pytest.raises(ConfigError, match="add --expert-parallel-size 2"):
        sizes(tp=4, moe_tp_size=2)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({}, "one process"),
        ({"tp": 2}, "2 processes: attention TP 2, dense TP 2, MoE TP 2, EP 1"),
        ({"data_parallel_size": 2}, "2 engines of one process each"),
        ({"data_parallel_size": 3, "tp": 2}, "3 engines of 2 processes each: attention TP 2"),
        (
            SHARED,
            "2 engines of one process share the experts: MoE TP 1, EP 2",
        ),
        (
            {**SHARED, "tp": 2},
            "2 engines of 2 processes share the experts: attention TP 2, dense TP 2, MoE TP 1, EP 4",
        ),
        ({"tp": 4, "nnodes": 2, "dist_init_addr": "a:1"}, "4 processes on 2 nodes: attention TP 4"),
    ],
)
def test_engines_and_their_processes_are_described(keywords: dict[str, Any], text: str) -> None:
    sizes = Config.from_keywords(**keywords).parallel_sizes()
    assert sizes.describe(has_experts=True).startswith(text)
    without_experts = sizes.describe(has_experts=False)
    assert without_experts == re.sub(
        r"[:,] MoE TP \d+, EP \d+", "", sizes.describe(has_experts=True)
    )


@pytest.mark.parametrize(
    ("keywords", "group", "text"),
    [
        ({"tp": 3}, "attn", "3 processes (--tensor-parallel-size 3)"),
        ({"ep_size": 3}, "world", "3 processes (--expert-parallel-size 3)"),
        (
            SHARED,
            "experts",
            "2 processes (--enable-expert-parallel --data-parallel-size 2)",
        ),
        ({"tp": 2, "data_parallel_size": 2}, "dense", "2 processes (--tensor-parallel-size 2)"),
        (
            {"tp": 4, "dense_tp_size": 2},
            "dense",
            "2 processes (--tensor-parallel-size 4 --dense-tp-size 2)",
        ),
    ],
)
def test_groups_name_the_given_flags(keywords: dict[str, Any], group: str, text: str) -> None:
    assert str(Config.from_keywords(**keywords).parallel_sizes().layout(0).group(group)) == text


def test_engines_that_share_experts_are_one_group() -> None:
    found = Config.from_keywords(
        data_parallel_size=4, enable_expert_parallel=True, moe_tp_size=2
    ).parallel_sizes()
    assert (found.world_size, found.num_sharing) == (1, 4)
    layout = found.layout(0, replica=3)
    ranks = {name: layout.group(name).ranks for name in layout.groups}
    everyone = (0, 1, 2, 3)
    assert ranks == {
        "attn": (3,),
        "dense": (3,),
        "moe": (2, 3),
        "experts": (1, 3),
        "data": everyone,
        "engine": (3,),
        "world": everyone,
    }
    apart = Config.from_keywords(data_parallel_size=4).parallel_sizes()
    assert (apart.num_sharing, apart.layout(0, replica=3).world_size) == (1, 1)


def test_ranks_of_engines_that_share_experts_are_consecutive() -> None:
    found = Config.from_keywords(**SHARED, tp=2).parallel_sizes()
    layout = found.layout(1, replica=1)
    assert (layout.rank, layout.world_size) == (3, 4)
    assert layout.group("attn").ranks == (2, 3)
    assert layout.group("data").ranks == (1, 3)


def test_short_names_work_in_every_source(tmp_path: Any) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tp: 2\nep-size: 2\n")
    assert load(Config, {}, {}, str(file)).tensor_parallel_size == 2
    assert load(Config, {}, {"TOKENSPEED_TP": "4"}, str(file)).tensor_parallel_size == 4
