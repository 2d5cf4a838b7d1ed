"""Latent attention: what the reference means, and which backend a device gets."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_kernels_blackwell import TORCH_MLA
from tokenspeed_kernels_blackwell.latent import mla_decode

from tokenspeed_core.errors import SelectionError
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.preference import Preference
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.kernels.spec import PlatformInfo
from tokenspeed_core.plugins import Catalog
from tokenspeed_core.testing.conformance import check
from tokenspeed_core.testing.explain import explain

DEEPSEEK = {
    "num_heads": 128, "latent_size": 512, "rope_size": 64, "block_size": 64, "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
}
SMALL = {"num_heads": 3, "latent_size": 8, "rope_size": 4, "block_size": 4, "dtype": "float32", "kv_dtype": "float32"}


def selector(capability: tuple[int, int], *backends: str) -> Selector:
    catalog = Catalog.discover()
    wanted = [Preference.parse("mla", backends)] if backends else []
    return Selector(
        installed_kernels(catalog), PlatformInfo("cuda", capability), wanted, ops=installed_ops(catalog),
        needs=frozenset({"graph_safe"}), module_exists=lambda name: True,
    )


def test_the_reference_conforms() -> None:
    assert check(TORCH_MLA, torch.device("cpu")) > 20


def test_each_head_attends_to_its_rows_entries_and_takes_their_leading_elements() -> None:
    torch.manual_seed(0)
    cache, q = torch.randn(5, 4, 12), torch.randn(2, 3, 12)
    table, lengths = torch.tensor([[4, 0], [2, 1]], dtype=torch.int32), torch.tensor([6, 3], dtype=torch.int32)
    y = mla_decode(SMALL)(q, cache, table, lengths, 6, 0.5)
    for row, entries in enumerate((torch.cat([cache[4], cache[0]])[:6], cache[2][:3])):
        for head in range(3):
            weights = torch.stack([q[row, head] @ entry * 0.5 for entry in entries]).exp()
            expected = sum(weight * entry[:8] for weight, entry in zip(weights, entries, strict=True)) / weights.sum()
            torch.testing.assert_close(y[row, head], expected)


def test_what_nobody_wrote_has_no_part_in_a_row_and_a_row_of_length_0_gives_zeros() -> None:
    cache = torch.full((3, 4, 12), float("nan"))
    cache[1, :2] = 1.0
    table = torch.tensor([[1, -1, 99], [-1, -1, -1]], dtype=torch.int32)
    y = mla_decode(SMALL)(torch.ones(2, 3, 12), cache, table, torch.tensor([2, 0], dtype=torch.int32), 12, 1.0)
    assert torch.equal(y[0], torch.ones(3, 8))
    assert torch.equal(y[1], torch.zeros(3, 8))


@pytest.mark.parametrize("num_heads", [16, 64, 128])
def test_the_library_is_taken_by_name_and_the_reference_by_auto(num_heads: int) -> None:
    problem = {**DEEPSEEK, "num_heads": num_heads}
    for names, taken in (((), "torch"), (("flashinfer",), "flashinfer")):
        chosen = selector((10, 3), *names)
        assert chosen.select("mla_decode", problem).spec.backend == taken
        passed_over = "it must be compiled before the first call" in explain(chosen.plan(), "mla_decode")
        assert passed_over is not bool(names)


def test_what_the_library_refuses_is_refused_when_the_model_is_built_with_the_reason() -> None:
    for axis, value, reason in (
        ("num_heads", 96, "num_heads 96 is above 64"), ("block_size", 16, "block_size 16 is not among 32, 64"),
        ("latent_size", 256, "latent_size 256 is below 512"), ("dtype", "float16", "dtype float16 is not among"),
    ):
        with pytest.raises(SelectionError, match=reason):
            selector((10, 0), "flashinfer").select("mla_decode", {**DEEPSEEK, axis: value})
    chosen = selector((9, 0))
    assert chosen.select("mla_decode", DEEPSEEK).spec.backend == "torch"
    assert "compute capability 9.0 is outside 10.0 to 10.3" in explain(chosen.plan(), "mla_decode")
