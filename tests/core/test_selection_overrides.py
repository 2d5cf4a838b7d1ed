"""Backend overrides: each one applies, or it is an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import (
    PHASES,
    Capability,
    KernelSpec,
    PlatformInfo,
)
from tokenspeed_core.api.ops import OpContract, merge_ops
from tokenspeed_core.errors import ConfigError, SelectionError
from tokenspeed_core.kernels.installed import InstalledKernel
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.plan import NothingFitsError
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.kernels.table import kernel_table

CPU = PlatformInfo("cpu")
ANYWHERE = Capability(("cpu",), ("float32", "bfloat16"))
PROBLEM = AttentionProblem("decode", 8, 2, 64, "bfloat16", "bfloat16", 16, 0.125, None)
LOGITS = {"vocab_size": 64, "dtype": "float32"}
NUM_LAYERS = 6


class Options(BaseModel):
    tile: int = 16


def make(problem: Any, **options: Any) -> None:
    """Stand in for a factory that is imported and not called."""


def kernel(backend: str, op: str = "attention", **changes: Any) -> InstalledKernel:
    spec = KernelSpec(
        op, backend, **{"capability": ANYWHERE, "load": f"{__name__}:make", **changes}
    )
    return InstalledKernel(spec, f"dist-{backend}")


def override(scope: str, *backends: str) -> Override:
    return Override.parse(scope, backends)


NAMES = ("one", "two", "three", "four", "five")
KERNELS = (*(kernel(name) for name in NAMES), kernel("plain", "greedy"), kernel("plain", "sample"))


def model(selector: Selector) -> dict[str, str]:
    """Select as a model of six layers does; return the attention backend of each phase."""
    selector.select("greedy", LOGITS)
    found = {}
    for layer in range(NUM_LAYERS):
        for phase in PHASES:
            choice = selector.select_attention(replace(PROBLEM, phase=phase), layer=layer)
            found[phase] = choice.spec.backend
    return found


@pytest.mark.parametrize("narrow", ["attention.decode", "attention.bf16"])
def test_phase_or_format_override_precedes_family_override(narrow: str) -> None:
    overrides = [override("attention", "one"), override(narrow, "two")]
    for order in (overrides, overrides[::-1]):
        selector = Selector(KERNELS, CPU, order)
        found = model(selector)
        expected = {"prefill": "one" if narrow.endswith("decode") else "two", "decode": "two"}
        assert found == expected
        selector.check()


def test_op_override_precedes_family_override() -> None:
    kernels = (*KERNELS, kernel("fast", "greedy"), kernel("fast", "sample"))
    overrides = [override("sampling", "plain"), override("greedy", "fast")]
    selector = Selector(kernels, CPU, overrides)
    assert selector.select("greedy", LOGITS).spec.backend == "fast"
    assert selector.select("sample", LOGITS).spec.backend == "plain"
    selector.check()


def test_equally_specific_overrides_are_refused() -> None:
    overrides = [override("attention.decode", "one"), override("attention.bf16", "two")]
    for order in (overrides, overrides[::-1]):
        with pytest.raises(SelectionError, match=r"attention.bf16 and .*attention.decode"):
            model(Selector(KERNELS, CPU, order))


@pytest.mark.parametrize(
    ("scopes", "flag"),
    [
        ((), "--attention-backend.decode two,auto"),
        (("attention",), "--attention-backend.decode two,auto"),
        (("attention.decode",), "--kernel-backend attention.decode=two,auto"),
        (("attention", "attention.bf16"), "--kernel-backend attention.bf16=two,auto"),
    ],
)
def test_hint_selects_the_other_kernel(scopes: tuple[str, ...], flag: str) -> None:
    given = {scope: override(scope, "one") for scope in scopes}
    selector = Selector(KERNELS, CPU, list(given.values()))
    selector.select_attention(PROBLEM, layer=1)
    (planned,) = selector.plan().ops
    assert flag == next(v.reasons[0].hint for v in planned.verdicts if v.backend == "two")
    typed, names = flag.replace("=", " ").removeprefix("--kernel-backend ").split()
    scope = typed.removeprefix("--").replace("-backend", "")
    changed = {**given, scope: override(scope, *names.split(","))}
    again = Selector(KERNELS, CPU, list(changed.values()))
    assert again.select_attention(PROBLEM, layer=1).spec.backend == "two"


def test_second_kernel_of_one_name_has_no_hint() -> None:
    kernels = (kernel("plain", "greedy"), kernel("plain", "greedy", load="builtins:print"))
    selector = Selector(kernels, CPU)
    selector.select("greedy", LOGITS)
    (planned,) = selector.plan().ops
    ((reason,),) = [verdict.reasons for verdict in planned.verdicts if verdict.reasons]
    assert reason.hint == ""


@pytest.mark.parametrize("names", [("auto", "one"), ("one", "auto", "two"), ("auto", "auto")])
def test_backend_after_auto_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--kernel-backend attention"):
        override("attention", *names)


def test_alternative_keeps_the_requested_backends_first() -> None:
    unfit = kernel("fast", "sample", capability=replace(ANYWHERE, dtypes=("float16",)))
    plain = (kernel("plain", "greedy"), kernel("plain", "sample"))
    kernels = (kernel("fast", "greedy"), unfit, *plain)
    with pytest.raises(NothingFitsError) as caught:
        Selector(kernels, CPU, [override("sampling", "fast")]).select("sample", LOGITS, layer=3)
    (planned,) = caught.value.plan.ops
    assert planned.alternative() == "--kernel-backend sampling=fast,plain,auto"
    assert planned.layers == (3,)
    again = Selector(kernels, CPU, [override("sampling", "fast", "plain", "auto")])
    backends = [again.select(op, LOGITS).spec.backend for op in ("greedy", "sample")]
    assert backends == ["fast", "plain"]


@pytest.mark.parametrize(
    ("given", "names"), [((), "slow,auto"), (("fast", "auto"), "fast,slow,auto")]
)
def test_kernel_that_must_be_compiled_is_offered_by_name(
    given: tuple[str, ...], names: str
) -> None:
    kernels = (
        kernel("fast", "greedy", requires=("no_such_library",)),
        kernel("slow", "greedy", needs_compile=True),
    )
    overrides = [override("greedy", *given)] if given else []
    with pytest.raises(NothingFitsError, match=f"--kernel-backend greedy={names}"):
        Selector(kernels, CPU, overrides).select("greedy", LOGITS)
    named = Selector(kernels, CPU, [override("greedy", *names.split(","))])
    assert named.select("greedy", LOGITS).spec.backend == "slow"


FORMATS = tuple(
    OpContract(name, "moe", "", {}, "a.b:c", "a.b:d", ())
    for name in ("experts", "experts_fp8", "experts_nvfp4")
)


def test_format_restricts_a_family_to_ops_of_that_suffix() -> None:
    kernels = [kernel(backend, each.name) for each in FORMATS for backend in ("one", "two")]
    selector = Selector(kernels, CPU, [override("moe.fp8", "two")], ops=merge_ops(FORMATS))
    backends = {
        each.name: selector.select(each.name, {"dtype": "bfloat16"}).spec.backend
        for each in FORMATS
    }
    assert backends == {"experts": "one", "experts_fp8": "two", "experts_nvfp4": "one"}
    selector.check()


def test_format_that_the_model_does_not_use_is_refused() -> None:
    overrides = [override("moe.nvfp4", "one")]
    kernels = [kernel("one", "experts_fp8")]
    selector = Selector(kernels, CPU, overrides, ops=merge_ops(FORMATS))
    selector.select("experts_fp8", {"dtype": "bfloat16"})
    with pytest.raises(SelectionError, match=r"moe.nvfp4 .*experts_fp8"):
        selector.check()


def test_op_name_may_have_a_vendor() -> None:
    assert override("acme/op.decode", "one").target == "acme/op"


@pytest.mark.parametrize(
    "scope",
    [
        "attention.later",
        "attention.0-3",
        "attention.decode.bf16",
        "attention.",
        "",
        ".decode",
        "a b",
    ],
)
def test_invalid_scope_is_refused(scope: str) -> None:
    with pytest.raises(ConfigError, match=r"OP\.PHASE or OP\.FORMAT"):
        override(scope, "one")


@pytest.mark.parametrize(
    ("scope", "named"),
    [
        ("attention.fp16", "attention decode bfloat16, attention prefill bfloat16"),
        ("greedy.decode", "greedy float32"),
        ("sample", "attention, greedy"),
        ("moe", "attention, greedy"),
    ],
)
def test_override_without_effect_is_refused(scope: str, named: str) -> None:
    backend = "one" if scope.startswith("attention") else "plain"
    selector = Selector(KERNELS, CPU, [override(scope, backend)])
    model(selector)
    with pytest.raises(SelectionError) as caught:
        selector.check()
    assert f"--kernel-backend {scope} " in str(caught.value)
    assert named in str(caught.value)


FUSED = OpContract(
    "both", "sampling", "", {"vocab_size": ""}, "a.b:c", "a.b:d", (), parts=("greedy", "sample")
)


def test_named_fused_op_that_does_not_fit_is_refused() -> None:
    unfit = kernel("fast", "both", capability=Capability(("cuda",), ("float32",)))
    kernels, ops = (*KERNELS, unfit), merge_ops((FUSED,))
    with pytest.raises(SelectionError, match="--kernel-backend both"):
        Selector(kernels, CPU, [override("both", "fast")], ops=ops).select_all(FUSED.parts, LOGITS)
    with_auto = Selector(kernels, CPU, [override("both", "fast", "auto")], ops=ops)
    choices = with_auto.select_all(FUSED.parts, LOGITS)
    assert [choice.spec.op for choice in choices] == ["greedy", "sample"]


def test_override_of_a_part_disables_the_fused_op() -> None:
    kernels, ops = (*KERNELS, kernel("fast", "both")), merge_ops((FUSED,))
    assert len(Selector(kernels, CPU, ops=ops).select_all(FUSED.parts, LOGITS)) == 1
    parted = Selector(kernels, CPU, [override("greedy", "plain")], ops=ops)
    choices = parted.select_all(FUSED.parts, LOGITS)
    assert [choice.spec.op for choice in choices] == ["greedy", "sample"]
    parted.check()


UNFIT = {
    "dtype": (
        {"capability": replace(ANYWHERE, dtypes=("float16",))},
        "dtype bfloat16 is not supported",
    ),
    "platform": (
        {"capability": replace(ANYWHERE, platforms=("cuda",))},
        "device cpu is not supported",
    ),
    "phase": (
        {"capability": replace(ANYWHERE, phases=("prefill",))},
        "phase decode is not supported",
    ),
    "library": ({"requires": ("no_such_library",)}, "module 'no_such_library' is not installed"),
    "broken": (
        {"load": "no_such_package.x:y", "requires": ("json",)},
        "it does not load: ModuleNotFoundError",
    ),
    "schema": ({"options": "no_such_package.x:Y"}, "it does not load: ModuleNotFoundError"),
    "no_model": (
        {"options": "json:loads"},
        "it does not load: TypeError: json:loads is not a pydantic model",
    ),
}


@given(st.lists(st.sampled_from(sorted(UNFIT)), min_size=1, unique=True), st.booleans())
def test_refusal_of_named_backends_has_all_reasons(names: list[str], has_auto: bool) -> None:
    kernels = [*KERNELS, *(kernel(name, **UNFIT[name][0]) for name in UNFIT)]
    given_names = (*names, "auto") if has_auto else tuple(names)
    selector = Selector(kernels, CPU, [override("attention", *given_names)])
    if has_auto:
        assert selector.select_attention(PROBLEM).spec.backend in NAMES
        return
    with pytest.raises(SelectionError) as caught:
        selector.select_attention(PROBLEM)
    lines = str(caught.value).splitlines()
    assert f"--kernel-backend attention selects {', '.join(names)}" in lines[0]
    for name in names:
        (line,) = (line for line in lines if line.startswith(f"  {name} (dist-{name}): "))
        assert UNFIT[name][1] in line
    assert all(name in lines[-1] for name in NAMES)
    assert f"--kernel-backend attention={','.join(names)}," in lines[-1]


@given(st.permutations([*UNFIT, *NAMES]))
def test_first_backend_of_a_list_that_fits_is_chosen(names: list[str]) -> None:
    kernels = [*KERNELS, *(kernel(name, **UNFIT[name][0]) for name in UNFIT)]
    selector = Selector(kernels, CPU, [override("attention", *names)])
    taken = selector.select_attention(PROBLEM).spec.backend
    assert taken == next(name for name in names if name in NAMES)


def test_table_fits_a_screen() -> None:
    options = kernel("tiled-of-a-vendor", options=f"{__name__}:Options")
    unfit = [kernel(f"{name}-of-a-vendor", **UNFIT[name][0]) for name in UNFIT]
    selector = Selector(
        [*KERNELS, options, *unfit],
        CPU,
        [override("attention.decode", "tiled-of-a-vendor")],
        options={"tiled-of-a-vendor.tile": "32"},
    )
    model(selector)
    lines = kernel_table(selector.plan()).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    reason = "library-of-a-vendor: module 'no_such_library' is not installed (attention)"
    assert f"  {reason}" in lines
    assert "tokenspeed plugins why attention" in lines[-1]
    rows = " ".join(" ".join(lines).split())
    assert "tiled-of-a-vendor dist-tiled-of-a-vendor decode, layers 0-5, tile=32 " in rows
    assert "five dist-five prefill, layers 0-5 " in rows


def test_family_override_skips_ops_without_its_backend() -> None:
    # As with `--moe-backend deepgemm`, which has experts and no router.
    kernels = (
        kernel("greedy-only", "greedy"),
        kernel("plain", "greedy"),
        kernel("plain", "sample"),
    )
    given = Override.parse("sampling", ("greedy-only",), "--sampling-backend (from a file)")
    selector = Selector(kernels, CPU, [given])
    backends = [selector.select(op, LOGITS).spec.backend for op in ("greedy", "sample")]
    assert backends == ["greedy-only", "plain"]
    selector.check()
    skipped = "greedy-only: no kernel for this op; --sampling-backend does not apply (sample)"
    assert kernel_table(selector.plan()).partition("backends not used:\n  ")[2].startswith(skipped)


def test_less_specific_override_replaces_one_without_a_kernel() -> None:
    draft = Override.parse("sampling", ("greedy-only",), "--draft", for_draft=True)
    kernels = (kernel("greedy-only", "greedy"), *KERNELS, kernel("best", "sample"))
    selector = Selector(kernels, CPU, [override("sampling", "plain"), draft], first_draft_layer=0)
    backends = [selector.select(op, LOGITS, layer=0).spec.backend for op in ("greedy", "sample")]
    assert backends == ["greedy-only", "plain"]


def test_override_without_a_kernel_for_the_model_is_refused() -> None:
    kernels = (*KERNELS, kernel("other", "mask_logits"))
    selector = Selector(kernels, CPU, [override("sampling", "other")])
    model(selector)
    with pytest.raises(SelectionError, match=r"other has no kernel .* greedy float32") as caught:
        selector.check()
    assert "plain" in str(caught.value)
    with pytest.raises(SelectionError, match="unheard: no such backend"):
        Selector(KERNELS, CPU, [override("sampling", "unheard")]).select("sample", LOGITS)


def test_override_of_an_op_is_strict() -> None:
    kernels = (kernel("greedy-only", "greedy"), *KERNELS)
    with pytest.raises(SelectionError, match="greedy-only: no such backend"):
        Selector(kernels, CPU, [override("sample", "greedy-only")]).select("sample", LOGITS)


@pytest.mark.parametrize(("backend", "ops"), [("plain", ["greedy", "sample"]), ("other", ["both"])])
def test_backend_of_a_part_counts_for_the_fused_op(backend: str, ops: list[str]) -> None:
    kernels = (*KERNELS, kernel("fast", "both"), kernel("other", "mask_logits"))
    selector = Selector(kernels, CPU, [override("sampling", backend)], ops=merge_ops((FUSED,)))
    assert [choice.spec.op for choice in selector.select_all(FUSED.parts, LOGITS)] == ops
