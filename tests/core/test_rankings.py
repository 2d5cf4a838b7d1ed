"""Rankings come from default distributions only, never from third parties."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tokenspeed_core.api.kernels import AutoDistribution, Capability, KernelSpec, Ranking
from tokenspeed_core.api.ops import OpReference
from tokenspeed_core.errors import PluginError
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops, installed_rankings
from tokenspeed_core.plugins import Catalog, Selection, Status

RANKINGS = (Ranking("attention", "decode", (9, 0), (("fast", "1.1 times the floor"),)),)
VENDORS = (AutoDistribution("vendor-kernels"),)
KERNEL = KernelSpec("greedy", "fast", Capability(("cpu",), ("float32",)), "builtins:print")
REFERENCE = KernelSpec("greedy", "slow", KERNEL.capability, "references:greedy", reference=True)
GREEDY = OpReference("greedy", "references:greedy", "references:inputs")


def discover(folder: Path, *names: str, strict: bool = False, entries: str = "") -> Catalog:
    """Return a catalog of distributions, each of which has rankings."""
    for name in names:
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[tokenspeed.rankings]\nof-{name} = {__name__}:RANKINGS [api1]\n{entries}"
        )
    return Catalog.discover(
        Selection(), distributions=distributions(path=[str(folder)]), strict=strict
    )


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def test_rankings_of_third_parties_are_ignored(
    tmp_path: Path,
) -> None:
    catalog = discover(tmp_path, "tokenspeed-kernels", "fast-kernels")
    assert installed_rankings(catalog) == RANKINGS
    foreign, own = catalog.all()
    assert (foreign.status, own.status) == (Status.INCOMPATIBLE, Status.OK)
    assert "rankings" in foreign.reason


def test_third_party_ranking_fails_a_strict_start(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"fast-kernels .* rankings"):
        discover(tmp_path, "fast-kernels", strict=True)


@pytest.mark.parametrize(
    ("distribution", "needs_ranking"),
    [("vendor-kernels", False), ("tokenspeed-kernels", False), ("acme-kernels", True)],
)
def test_third_party_kernels_need_a_ranking(
    tmp_path: Path, distribution: str, needs_ranking: bool
) -> None:
    vendors = f"vendors = {__name__}:VENDORS [api1]\n"
    kernels = f"[tokenspeed.kernels.sampling]\nfast = {__name__}:KERNEL [api1]\n"
    if distribution == "tokenspeed-kernels":
        catalog = discover(tmp_path, distribution, entries=vendors + kernels)
    else:
        discover(tmp_path, "tokenspeed-kernels", entries=vendors)
        catalog = discover(tmp_path, distribution, entries=kernels)
    (kernel,) = installed_kernels(catalog)
    assert kernel.needs_ranking is needs_ranking


def test_third_party_reference_needs_no_ranking(tmp_path: Path) -> None:
    ops = f"[tokenspeed.ops]\ncore = {__name__}:GREEDY [api1]\n"
    kernels = f"[tokenspeed.kernels.sampling]\nslow = {__name__}:REFERENCE [api1]\n"
    discover(tmp_path, "tokenspeed-kernels", entries=ops)
    (kernel,) = installed_kernels(discover(tmp_path, "acme-kernels", entries=kernels))
    assert not kernel.needs_ranking


def test_third_party_cannot_define_core_references(tmp_path: Path) -> None:
    ops = f"[tokenspeed.ops]\ncore = {__name__}:GREEDY [api1]\n"
    catalog = discover(tmp_path, "acme-kernels", entries=ops)
    assert installed_ops(catalog)["greedy"].reference == ""
    (entry,) = (each for each in catalog.all() if each.kind == "ops")
    assert entry.status is Status.FAILED
