"""The collectives of a kernel plan."""

from __future__ import annotations

from dataclasses import replace

from tokenspeed_core.api import FUSED_OP, SAMPLING, Collective
from tokenspeed_core.kernels.plan import KernelPlan, PlannedCollective
from tokenspeed_core.kernels.table import describe_collectives


def planned(op: str, source: str, target: str, size: int) -> PlannedCollective:
    reason = f"{source} is partial, and {target} needs it replicated"
    return PlannedCollective(Collective(op, "attn", size, "bfloat16", source, target, reason), 4)


def plan(*collectives: PlannedCollective, not_fused: str = "") -> KernelPlan:
    return KernelPlan("cpu", (), collectives, not_fused)


def test_a_ring_sends_each_part_once_or_twice() -> None:
    assert planned("all_reduce", "a", "b", 100).bytes_per_token == 200
    assert planned("all_reduce", "a", "b", 100).sent_bytes_per_token == 300
    assert planned("all_gather", "a", "b", 100).sent_bytes_per_token == 150


def test_equal_layers_share_a_line() -> None:
    collectives = [
        *(planned("all_reduce", f"layers.{each}.out", "norm", 100) for each in range(3)),
        planned("all_gather", "head", SAMPLING, 1000),
    ]
    total, line, reason, *others = describe_collectives(plan(*collectives, not_fused="why"))
    assert "900 B" in total
    assert "1,500 B more" in total
    assert line.strip().startswith("3 x all_reduce (attn, 4 processes): 200 B")
    assert "layers.*.out is partial" in reason
    assert others[-1].strip() == "no all-reduce is fused with a norm: why"


def test_fused_collectives_show_their_limit() -> None:
    plain = planned("all_reduce", "layers.0.out", "norm", 100)
    fused = replace(plain, collective=replace(plain.collective, max_fused_tokens=51))
    _, first, _, second, _ = describe_collectives(plan(plain, fused))
    assert FUSED_OP not in first
    assert FUSED_OP in second
    assert "51 tokens" in second


def test_fused_collectives_show_their_op() -> None:
    plain = planned("all_reduce", "layers.0.out", "norm", 100).collective
    fused = [
        PlannedCollective(replace(plain, max_fused_tokens=51, fused_op=op), 4)
        for op in (FUSED_OP, f"{FUSED_OP}_fp8")
    ]
    _, first, _, second, _ = describe_collectives(plan(*fused))
    assert f"as {FUSED_OP} in" in first
    assert f"as {FUSED_OP}_fp8 in" in second


def test_only_all_reduces_can_be_fused() -> None:
    assert list(describe_collectives(plan(not_fused="why"))) == []
    gather = planned("all_gather", "head", SAMPLING, 1000)
    assert len(list(describe_collectives(plan(gather, not_fused="why")))) == 3


def test_draft_model_has_its_own_collectives() -> None:
    target = [planned("all_reduce", "out", "norm", 100), planned("all_gather", "head", SAMPLING, 9)]
    draft = [replace(each, is_draft=True) for each in target]
    alone = list(describe_collectives(plan(*target)))
    both = list(describe_collectives(plan(*target, *draft)))
    assert both[: len(alone)] == alone
    heading, *lines = both[len(alone) :]
    assert "draft model: in each pass, each process sends 300 B per token" in heading
    assert "per draft token" in heading
    assert lines == alone[1:]
