"""Kernel selection: the chosen kernel, and the reasons against others. Needs no tensor library."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenspeed_testing.explain import backends, explain

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import (
    PHASES,
    AxisLimit,
    Capability,
    KernelSpec,
    PlatformInfo,
    Ranking,
)
from tokenspeed_core.api.ops import OpContract, merge_ops
from tokenspeed_core.errors import SelectionError
from tokenspeed_core.kernels.installed import InstalledKernel
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.plan import NothingFitsError
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.kernels.table import kernel_table

CPU = PlatformInfo("cpu")
HOPPER = PlatformInfo("cuda", (9, 0), "a device of compute capability 9.0")
LOGITS = {"vocab_size": 64, "dtype": "float32"}
ATTENTION = AttentionProblem("decode", 8, 2, 64, "bfloat16", "bfloat16", 16, 0.125, None)

EVERYWHERE = Capability(("cpu", "cuda"), ("float32", "bfloat16"), features=frozenset({"window"}))
ON_CUDA = Capability(("cuda",), ("float32", "bfloat16"))
ON_HOPPER = replace(ON_CUDA, min_compute_capability=(9, 0), max_compute_capability=(9, 0))


def kernel(
    backend: str, capability: Capability, distribution: str = "", **changes: Any
) -> InstalledKernel:
    spec = KernelSpec(
        op=changes.pop("op", "greedy"),
        backend=backend,
        capability=capability,
        **{"load": "builtins:print", **changes},
    )
    return InstalledKernel(spec, distribution or f"dist-{backend}")


def override(scope: str, *backends: str) -> Override:
    family, dot, where = scope.partition(".")
    return Override.parse(scope, backends, f"--{family}-backend{dot}{where}")


REFERENCE = kernel("plain", EVERYWHERE, reference=True)
PORTABLE = kernel("portable", ON_CUDA)
SPECIAL = kernel("special", ON_HOPPER)


def test_narrower_kernel_is_preferred_reference_is_last() -> None:
    for kernels in ((REFERENCE, PORTABLE, SPECIAL), (SPECIAL, PORTABLE, REFERENCE)):
        assert Selector(kernels, HOPPER).select("greedy", LOGITS).spec.backend == "special"
    assert (
        Selector((REFERENCE, PORTABLE), HOPPER).select("greedy", LOGITS).spec.backend == "portable"
    )
    assert Selector((REFERENCE, PORTABLE), CPU).select("greedy", LOGITS).spec.backend == "plain"


def test_ties_are_broken_by_distribution_name() -> None:
    first, second = kernel("zeta", ON_CUDA, "a-dist"), kernel("alpha", ON_CUDA, "b-dist")
    assert Selector((second, first), HOPPER).select("greedy", LOGITS).spec is first.spec


def test_ranked_kernels_come_first_in_each_phase() -> None:
    kernels = [
        kernel(name, replace(ON_CUDA, features=frozenset()), op="attention")
        for name in ("one", "two")
    ]
    kernels.append(kernel("special", ON_HOPPER, op="attention"))
    rankings = [
        Ranking(
            "attention",
            "decode",
            (9, 0),
            (("two", "1.2 times the floor"), ("one", "1.5 times the floor")),
        ),
        Ranking("attention", "prefill", (9, 0), (("one", "2 times the floor"),)),
        Ranking("attention", "decode", (8, 0), (("one", "3 times the floor"),)),
    ]
    selector = Selector(kernels, HOPPER, rankings=rankings)
    assert selector.select_attention(ATTENTION).spec.backend == "two"
    assert selector.select_attention(replace(ATTENTION, phase="prefill")).spec.backend == "one"
    explained = explain(selector.plan(), "attention")
    assert "two from dist-two: 1.2 times the floor" in explained
    assert (
        "not one from dist-one: 1.5 times the floor, two comes first -> --attention-backend.decode one"
        in explained
    )
    assert (
        "not special from dist-special: not in the measured ranking for compute capability 9.0, two comes first"
        in explained
    )
    older = Selector(kernels, PlatformInfo("cuda", (8, 0)), rankings=rankings)
    assert older.select_attention(ATTENTION).spec.backend == "one"


def test_unsuitable_ranked_kernel_is_skipped() -> None:
    ranking = Ranking("greedy", None, (9, 0), (("slow", "1"), ("narrow", "2"), ("portable", "3")))
    slow = kernel("slow", ON_HOPPER, needs_compile=True)
    narrow = kernel("narrow", replace(ON_HOPPER, dtypes=("float16",)))
    selector = Selector((SPECIAL, slow, narrow, PORTABLE), HOPPER, rankings=[ranking])
    assert selector.select("greedy", LOGITS).spec.backend == "portable"


def test_unmeasured_kernel_of_a_ranked_backend_needs_its_name() -> None:
    ranking = Ranking("greedy", None, (9, 0), (("new", "1"), ("portable", "2")))
    new = kernel("new", ON_HOPPER, needs_name=True)
    selector = Selector((new, PORTABLE), HOPPER, rankings=[ranking])
    assert selector.select("greedy", LOGITS).spec.backend == "portable"
    assert "no measured ranking for this device covers this kernel" in explain(
        selector.plan(), "greedy"
    )
    named = Selector((new, PORTABLE), HOPPER, [override("greedy", "new")], rankings=[ranking])
    assert named.select("greedy", LOGITS).spec.backend == "new"


def test_auto_skips_a_kernel_that_fails_to_load() -> None:
    broken = kernel(
        "broken", ON_HOPPER, requires=("json",), obtain="pip install it again", load="a.b:c"
    )
    selector = Selector((broken, PORTABLE), HOPPER)
    assert selector.select("greedy", LOGITS).spec.backend == "portable"
    assert "not broken from dist-broken: it does not load: ModuleNotFoundError" in explain(
        selector.plan(), "greedy"
    )
    with pytest.raises(
        SelectionError, match=r"broken \(dist-broken\): it does not load: ModuleNotFoundError"
    ):
        Selector((broken, PORTABLE), HOPPER, [override("sampling", "broken")]).select(
            "greedy", LOGITS
        )


def test_third_party_kernel_that_fails_to_load_is_skipped() -> None:
    strange = kernel("strange", ON_HOPPER, load="a.b:c")
    ours = kernel("ours", ON_HOPPER, "tokenspeed-kernels", load="a.b:c")
    selector = Selector((strange, PORTABLE), HOPPER)
    assert selector.select("greedy", LOGITS).spec.backend == "portable"
    assert "it does not load: ModuleNotFoundError: No module named 'a'" in explain(
        selector.plan(), "greedy"
    )
    assert Selector((ours, PORTABLE), HOPPER).select("greedy", LOGITS).spec.backend == "ours", (
        "ours is not imported"
    )


def third_party(backend: str, *, op: str = "greedy") -> InstalledKernel:
    return replace(kernel(backend, ON_HOPPER, op=op), needs_ranking=True)


def test_auto_does_not_choose_an_unranked_third_party_kernel() -> None:
    selector = Selector((third_party("acme/fast"), PORTABLE, REFERENCE), HOPPER)
    assert selector.select("greedy", LOGITS).spec.backend == "portable"
    assert selector.plan().unused_third_party() == ("--sampling-backend acme/fast",)
    message = explain(selector.plan(), "greedy")
    assert "not acme/fast" in message
    assert "--kernel-backend greedy=acme/fast,auto" in message


def test_named_third_party_kernel_runs() -> None:
    override = Override("greedy", ("acme/fast",), "--kernel-backend greedy")
    selector = Selector((third_party("acme/fast"), PORTABLE), HOPPER, [override])
    assert selector.select("greedy", LOGITS).spec.backend == "acme/fast"
    assert selector.plan().unused_third_party() == ()


def test_auto_chooses_a_ranked_third_party_kernel() -> None:
    ranking = Ranking("greedy", None, (9, 0), (("acme/fast", "1 us"),))
    selector = Selector((PORTABLE, third_party("acme/fast")), HOPPER, rankings=[ranking])
    assert selector.select("greedy", LOGITS).spec.backend == "acme/fast"


def test_third_party_attention_is_offered_with_its_flag_once() -> None:
    kernels = (third_party("acme/flash", op="attention"), kernel("one", ON_CUDA, op="attention"))
    selector = Selector(kernels, HOPPER)
    for phase in PHASES:
        selector.select_attention(replace(ATTENTION, phase=phase))
    assert selector.plan().unused_third_party() == ("--attention-backend acme/flash",)


def test_plan_names_ops_that_run_their_reference() -> None:
    selector = Selector((REFERENCE, PORTABLE), CPU)
    selector.select("greedy", LOGITS)
    assert selector.plan().reference_ops() == ("greedy",)
    on_gpu = Selector((REFERENCE, PORTABLE), HOPPER)
    on_gpu.select("greedy", LOGITS)
    assert on_gpu.plan().reference_ops() == ()
    named = Selector((REFERENCE,), HOPPER, [Override("greedy", ("plain",), "--x")])
    named.select("greedy", LOGITS)
    assert named.plan().reference_ops() == ()


def test_ranking_is_not_missed_where_there_is_none() -> None:
    for kernels, platform in (((SPECIAL, REFERENCE), CPU), ((PORTABLE,), HOPPER)):
        selector = Selector(kernels, platform)
        selector.select("greedy", LOGITS)
        assert "measured" not in explain(selector.plan(), "greedy")


def test_missing_module_shows_how_to_obtain_it() -> None:
    lacking = kernel(
        "lacking", ON_HOPPER, requires=("no_such_module",), obtain="pip install 'x[lacking]'"
    )
    selector = Selector((lacking, PORTABLE), HOPPER)
    selector.select("greedy", LOGITS)
    assert "module 'no_such_module' is not installed -> pip install 'x[lacking]'" in explain(
        selector.plan(), "greedy"
    )


def test_auto_skips_a_kernel_that_needs_compiling() -> None:
    slow = kernel("slow", ON_HOPPER, needs_compile=True)
    ranking = Ranking("greedy", None, (9, 0), (("slow", "1 us"), ("portable", "2 us")))
    for rankings, figure in (
        ((), "no measured ranking for compute capability 9.0"),
        ((ranking,), "1 us"),
    ):
        selector = Selector((slow, PORTABLE), HOPPER, rankings=rankings)
        assert selector.select("greedy", LOGITS).spec.backend == "portable"
        explained = explain(selector.plan(), "greedy")
        assert f"must be compiled before the first call; {figure} -> " in explained
    named = Selector((slow, PORTABLE), HOPPER, [override("sampling", "slow")])
    assert named.select("greedy", LOGITS).spec.backend == "slow"


def test_unsuitable_override_reports_every_reason() -> None:
    wrong = kernel(
        "wrong",
        Capability(("cuda",), ("float16",), limits=(AxisLimit("vocab_size", 128),)),
        requires=("absent",),
    )
    selector = Selector(
        (wrong, REFERENCE),
        HOPPER,
        [override("sampling", "wrong", "unheard")],
        module_exists=lambda name: False,
    )
    with pytest.raises(SelectionError) as caught:
        selector.select("greedy", LOGITS)
    message = str(caught.value)
    for part in (
        "--sampling-backend selects wrong, unheard",
        "-> --dtype float16; ",
        "vocab_size 64 is below 128",
        "module 'absent' is not installed",
        "unheard: no such backend",
        "backends that fit: plain",
    ):
        assert part in message


def test_listed_backends_are_tried_in_order() -> None:
    on_cpu = Selector((REFERENCE, PORTABLE), CPU, [override("sampling", "portable", "auto")])
    assert on_cpu.select("greedy", LOGITS).spec.backend == "plain"
    reversed_order = Selector(
        (PORTABLE, SPECIAL), HOPPER, [override("sampling", "portable", "special")]
    )
    assert reversed_order.select("greedy", LOGITS).spec.backend == "portable"


def test_override_of_a_phase_takes_precedence() -> None:
    kernels = [
        kernel(name, replace(EVERYWHERE, features=frozenset()), op="attention")
        for name in ("one", "two")
    ]
    overrides = [override("attention", "one"), override("attention.prefill", "two")]
    selector = Selector(kernels, HOPPER, overrides)
    assert selector.select_attention(ATTENTION).spec.backend == "one"
    assert selector.select_attention(replace(ATTENTION, phase="prefill")).spec.backend == "two"


def test_undeclared_features_are_refused() -> None:
    bare = kernel("bare", ON_CUDA, op="attention")
    needing = {
        "window": {"window": 128},
        "chunked": {"window": 128, "is_chunked": True},
        "soft_cap": {"soft_cap": 50.0},
        "sinks": {"has_sinks": True},
        "value_head_size": {"value_head_size": 32},
        "bidirectional": {"is_bidirectional": True},
    }
    for feature, changes in needing.items():
        with pytest.raises(SelectionError, match=f"the feature {feature} is not supported"):
            Selector((bare,), HOPPER).select_attention(replace(ATTENTION, **changes))
    graphs = Selector((bare,), HOPPER, needs=frozenset({"graph_safe"}))
    for phase in PHASES:
        with pytest.raises(SelectionError, match="the feature graph_safe"):
            graphs.select_attention(replace(ATTENTION, phase=phase))


@pytest.mark.parametrize(
    ("declared", "problem", "hint"),
    [
        (
            {"kv_dtypes": ("bfloat16", "float16")},
            {"kv_dtype": "float8_e4m3fn"},
            "--kv-cache-dtype auto",
        ),
        (
            {"kv_dtypes": ("float16",)},
            {"kv_dtype": "float8_e4m3fn"},
            "--kv-cache-dtype auto --dtype float16",
        ),
        ({"kv_dtypes": ("float8_e4m3fn",)}, {}, "--kv-cache-dtype fp8_e4m3"),
        ({"kv_dtypes": ("float8_e5m2",)}, {}, ""),
        ({"dtypes": ("float32",)}, {}, "--dtype float32"),
        ({"block_sizes": (64, 128)}, {}, "--block-size 64"),
        ({"head_sizes": (128,)}, {}, ""),
        ({"features": frozenset()}, {}, "--enforce-eager"),
    ],
)
def test_refusal_suggests_a_flag_only_if_it_helps(
    declared: dict[str, Any], problem: dict[str, Any], hint: str
) -> None:
    capability = replace(ON_CUDA, **{"features": frozenset({"graph_safe"}), **declared})
    selector = Selector(
        (kernel("new", capability, op="attention"),), HOPPER, needs=frozenset({"graph_safe"})
    )
    with pytest.raises(NothingFitsError) as caught:
        selector.select_attention(replace(ATTENTION, **problem))
    ((verdict,),) = (planned.verdicts for planned in caught.value.plan.ops)
    assert [reason.hint for reason in verdict.reasons] == [hint]


def test_device_outside_the_range_is_explained() -> None:
    selector = Selector((SPECIAL, REFERENCE), PlatformInfo("cuda", (8, 0)))
    assert selector.select("greedy", LOGITS).spec.backend == "plain"
    assert "compute capability 8.0 is not supported" in explain(selector.plan(), "greedy")


def test_plan_lists_the_layers_of_each_problem() -> None:
    selector = Selector((kernel("plain", EVERYWHERE, op="attention"), REFERENCE), CPU)
    for layer in (3, 0, 1, 5):
        selector.select_attention(ATTENTION, layer=layer)
    selector.select_attention(replace(ATTENTION, window=64), layer=2)
    selector.select("greedy", LOGITS)
    plan = selector.plan()
    assert plan == selector.plan()
    assert [planned.layers for planned in plan.find("attention")] == [(0, 1, 3, 5), (2,)]
    assert len(plan.find("attention", layer=2)) == 1
    assert "layers [0, 1, 3, 5]" in explain(plan, "attention")
    assert backends(plan) == {"attention": ("plain",), "sampling": ("plain",)}
    assert json.loads(plan.to_json())["ops"][0]["layers"] == [0, 1, 3, 5]
    assert all(len(line) < 120 for line in kernel_table(plan).splitlines())


def test_equal_problems_share_one_choice() -> None:
    selector = Selector((REFERENCE,), CPU)
    assert selector.select("greedy", LOGITS) is selector.select("greedy", dict(LOGITS))


def test_wrong_problem_names_missing_and_unknown_axes() -> None:
    with pytest.raises(ValueError, match=r"missing \['vocab_size'\], unknown \['seize'\]"):
        Selector((REFERENCE,), CPU).select("greedy", {"seize": 3, "dtype": "float32"})
    with pytest.raises(SelectionError, match="unknown op 'ydeerg'"):
        Selector((REFERENCE,), CPU).select("ydeerg", LOGITS)


AXES = {
    **LOGITS,
    "num_kv_heads": 2,
    "head_size": 64,
    "value_head_size": None,
    "block_size": 16,
    "kv_dtype": "float32",
}
FUSED = OpContract(
    "greedy_write",
    "sampling",
    "",
    {"head_size": "", "vocab_size": ""},
    "a.b:c",
    "a.b:d",
    (),
    parts=("greedy", "write_kv"),
)
PARTS = (REFERENCE, kernel("plain", EVERYWHERE, op="write_kv"))


def test_fused_op_replaces_its_parts_if_it_fits() -> None:
    fast = kernel("fast", ON_CUDA, op="greedy_write")
    selector = Selector((*PARTS, fast), HOPPER, ops=merge_ops((FUSED,)))
    (choice,) = selector.select_all(FUSED.parts, AXES, layer=3)
    assert (choice.spec, dict(choice.problem)) == (fast.spec, {"head_size": 64, **LOGITS})
    assert [(planned.op, planned.backend, planned.layers) for planned in selector.plan().ops] == [
        ("greedy_write", "fast", (3,))
    ]


def test_parts_run_if_no_fused_kernel_fits() -> None:
    fast = kernel("fast", ON_CUDA, op="greedy_write")
    selector = Selector((*PARTS, fast), CPU, ops=merge_ops((FUSED,)))
    choices = selector.select_all(FUSED.parts, AXES)
    assert [(choice.spec.op, sorted(choice.problem)) for choice in choices] == [
        ("greedy", ["dtype", "vocab_size"]),
        ("write_kv", sorted(AXES.keys() - {"vocab_size"})),
    ]
    plan = selector.plan()
    assert backends(plan) == {"sampling": ("plain",), "cache": ("plain",)}
    assert (
        "no kernel fits; the ops that it fuses run separately\n  not fast from dist-fast: device cpu is not supported"
        in explain(plan, "greedy_write")
    )
    assert "(unfused)" in kernel_table(plan)


def test_select_fused_returns_none_if_nothing_fits() -> None:
    fast, problem = kernel("fast", ON_CUDA, op="greedy_write"), FUSED.cut(AXES)
    taken = Selector((*PARTS, fast), HOPPER, ops=merge_ops((FUSED,))).select_fused(
        "greedy_write", problem
    )
    assert taken is not None and taken.spec == fast.spec
    assert (
        Selector((*PARTS, fast), CPU, ops=merge_ops((FUSED,))).select_fused("greedy_write", problem)
        is None
    )


def test_ops_without_a_fused_op_are_selected_singly() -> None:
    with pytest.raises(SelectionError, match="unknown op 'greedier'"):
        Selector(PARTS, CPU).select_all(("greedy", "greedier"), AXES)
    choices = Selector(PARTS, CPU).select_all(("write_kv", "greedy"), AXES)
    assert [choice.spec.op for choice in choices] == ["write_kv", "greedy"]


@pytest.mark.parametrize(
    "build",
    [
        lambda: Capability((), ("float32",)),
        lambda: Capability(("cpu",), ("float31",)),
        lambda: Capability(("cuda",), ("float32",), (9, 0), (8, 0)),
        lambda: Capability(("cuda",), ("float32",), features=frozenset({"fast"})),
        lambda: Capability(("cuda",), ("float32",), phases=("later",)),
        lambda: Capability(("cuda",), ("float32",), head_sizes=(0,)),
        lambda: AxisLimit("vocab_size", 10, 9),
        lambda: AxisLimit("vocab_size", 10, 15, multiple_of=16),
        lambda: kernel("auto", ON_CUDA),
        lambda: kernel("Loud Name", ON_CUDA),
        lambda: kernel("x", ON_CUDA, requires=("a.b",)),
        lambda: KernelSpec("greedy", "x", ON_CUDA, load="module.attribute"),
    ],
)
def test_invalid_descriptors_are_rejected(build: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        build()


def test_selecting_imports_no_tensor_library() -> None:
    code = (
        "import sys; import tokenspeed_core.api; from tokenspeed_core.kernels.select import Selector\n"
        "from tokenspeed_core.api.kernels import Capability, KernelSpec, PlatformInfo\n"
        "from tokenspeed_core.kernels.installed import InstalledKernel\n"
        "can = Capability(('cpu',), ('float32',))\n"
        "spec = KernelSpec(op='greedy', backend='plain', capability=can, load='builtins:print', reference=True)\n"
        "selector = Selector((InstalledKernel(spec, 'some'),), PlatformInfo('cpu'))\n"
        "assert selector.select('greedy', {'vocab_size': 64, 'dtype': 'float32'}).spec is spec\n"
        "assert not {'torch', 'numpy', 'triton'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_the_chosen_kernel_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("chosen", "passed_over"):
        (tmp_path / f"{name}_kernel.py").write_text("def make(problem):\n    return abs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    narrow = kernel("narrow", ON_HOPPER, load="chosen_kernel:make")
    wide = kernel("wide", ON_CUDA, load="passed_over_kernel:make")
    choice = Selector((narrow, wide), HOPPER).select("greedy", LOGITS)
    assert choice.spec.factory(choice.options)(None) is abs
    assert "passed_over_kernel" not in sys.modules
    monkeypatch.delitem(sys.modules, "chosen_kernel")
