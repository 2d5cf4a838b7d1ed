"""A step's inputs made with NumPy and made with device kernels are the same."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

import numpy as np
import pytest
import torch
from tokenspeed_testing.plans import PlanMaker

from tokenspeed_core.api.attention import AttentionStep
from tokenspeed_core.worker.inputs import DeviceInputMaker, HostInputMaker, StepInputs
from tokenspeed_core.worker.sampler import RunnerKernels
from tokenspeed_core.worker.slots import SlotLayout, SlotState
from tokenspeed_core.worker.transfer import HostTransfer
from tokenspeed_kernels.reference.cache import advance_rows, map_tokens

BLOCK, GROUPS = 4, 2


def make_rows() -> SlotState:
    rows = SlotState(SlotLayout(num_slots=6, num_blocks=8, num_groups=GROUPS), torch.device("cpu"))
    rows.reset(padding_block=99)
    rows.last_token[:] = torch.arange(50, 56, dtype=torch.int32)
    return rows


def check_step(host: AttentionStep | None, device: AttentionStep | None) -> None:
    assert (host is None) == (device is None)
    if host is None or device is None:
        return
    for name in (field.name for field in fields(AttentionStep)):
        one, other = getattr(host, name), getattr(device, name)
        if name == "block_table":
            width = one.shape[1]
            assert torch.equal(one, other[:, :width])
            assert width * BLOCK >= host.max_seq_len
        elif isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), name
        else:
            assert one == other, name


def check(host: StepInputs, device: StepInputs) -> None:
    for name in ("token_ids", "positions", "rows.device_slots", "rows.new_positions"):
        one, other = map(attrgetter(name), (host, device))
        assert one.dtype == other.dtype == torch.int64
        assert torch.equal(one, other), name
    assert np.array_equal(host.rows.plan_rows, device.rows.plan_rows)
    assert np.array_equal(host.rows.slots, device.rows.slots)
    assert (host.logit_index is None) == (device.logit_index is None)
    if host.logit_index is not None and device.logit_index is not None:
        assert torch.equal(host.logit_index, device.logit_index)
    for one, other in zip(host.groups, device.groups, strict=True):
        assert torch.equal(one.kv_slots, other.kv_slots)
        assert one.num_decodes == other.num_decodes
        check_step(one.step, other.step)
        check_step(one.decodes, other.decodes)
        check_step(one.prefills, other.prefills)


@pytest.mark.parametrize("split", [(False, False), (True, False)])
def test_both_ways_give_the_same_inputs_and_leave_the_same_state(split: tuple[bool, ...]) -> None:
    host, device = make_rows(), make_rows()
    host_maker = HostInputMaker(host, BLOCK, split)
    kernels = RunnerKernels(print, {}, {}, advance_rows({}), map_tokens({"block_size": BLOCK}))
    device_maker = DeviceInputMaker(device, kernels, split, HostTransfer())
    plans = PlanMaker(BLOCK, GROUPS)
    plans.add("a", list(range(10)), 4, temperature=0.5, seed=-1)
    plans.add("b", list(range(20, 27)), 1, top_k=5)
    plans.add("c", [30], 0)
    for decodes, chunks in (
        ((), {"a": 3, "c": 1}),
        (("c",), {"a": 7, "b": 2}),
        (("c", "a"), {"b": 5}),
        (("b", "c", "a"), {}),
        (("a",), {}),
    ):
        plan = plans.plan(decodes, chunks)
        check(host_maker.make(plan), device_maker.make(plan))
        assert torch.equal(host.words, device.words)
    assert host.seq_len.tolist() == [4, 8, 0, 0, 13, 0]
    assert host.seed[4] == -1
    assert host.temperature[4] == 0.5
    assert host.top_k[1] == 5


def test_a_token_stands_in_its_block_at_its_offset() -> None:
    maker = HostInputMaker(make_rows(), BLOCK, (False, False))
    plans = PlanMaker(BLOCK, GROUPS)
    plans.add("a", list(range(10)), 4).blocks = [[7, 3], [5, 6]]
    inputs = maker.make(plans.plan(chunks={"a": 6}))
    assert inputs.groups[0].kv_slots.tolist() == [28, 29, 30, 31, 12, 13]
    assert inputs.groups[1].kv_slots.tolist() == [20, 21, 22, 23, 24, 25]
    assert inputs.groups[0].step.block_table.tolist() == [[7, 3]]
