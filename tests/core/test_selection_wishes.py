"""What a user asks of backends: it is heeded where it applies, or it is an error; never is it passed over."""

from __future__ import annotations

import itertools
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
    InstalledKernel,
    KernelSpec,
    PlatformInfo,
)
from tokenspeed_core.api.ops import OpContract, merge_ops
from tokenspeed_core.errors import ConfigError, SelectionError
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.plan import NothingFitsError
from tokenspeed_core.kernels.select import Selector

CPU = PlatformInfo("cpu")
ANYWHERE = Capability(("cpu",), ("float32", "bfloat16"))
PROBLEM = AttentionProblem("decode", 8, 2, 64, "bfloat16", "bfloat16", 16, 0.125, None)
LOGITS = {"vocab_size": 64, "dtype": "float32"}
NUM_LAYERS = 6


class Options(BaseModel):
    tile: int = 16


def make(problem: Any, **options: Any) -> None:
    """Stand for a factory, which is imported and not called."""


def kernel(backend: str, op: str = "attention", **changes: Any) -> InstalledKernel:
    spec = KernelSpec(
        op, backend, **{"capability": ANYWHERE, "load": f"{__name__}:make", **changes}
    )
    return InstalledKernel(spec, f"dist-{backend}")


def wish(scope: str, *backends: str) -> Override:
    return Override.parse(scope, backends)


NAMES = ("one", "two", "three", "four", "five")
KERNELS = (*(kernel(name) for name in NAMES), kernel("plain", "greedy"), kernel("plain", "sample"))


def model(selector: Selector) -> dict[tuple[str, int], str]:
    """Select as a model of six layers does; return the attention backend by phase and layer."""
    selector.select("greedy", LOGITS)
    return {
        (phase, layer): selector.select_attention(
            replace(PROBLEM, phase=phase), layer=layer
        ).spec.backend
        for layer in range(NUM_LAYERS)
        for phase in PHASES
    }


# -- narrowing ----------------------------------------------------------------------------------------------


def test_layers_go_before_a_phase_a_phase_before_a_dtype_and_a_dtype_before_all() -> None:
    wishes = [
        wish("attention", "one"),
        wish("attention.bfloat16", "two"),
        wish("attention.decode", "three"),
        wish("attention.1-2", "four"),
        wish("attention.decode.2", "five"),
    ]
    for order in itertools.permutations(wishes):
        selector = Selector(KERNELS, CPU, order)
        found = model(selector)
        assert [found["prefill", layer] for layer in range(4)] == ["two", "four", "four", "two"]
        assert [found["decode", layer] for layer in range(4)] == ["three", "four", "five", "three"]
        selector.check()


@pytest.mark.parametrize(
    ("wishes", "told"),
    [
        ((), "--attention-backend.decode two,auto"),
        (("attention",), "--attention-backend.decode two,auto"),
        (("attention.bfloat16",), "--attention-backend.decode two,auto"),
        (("attention.decode",), "--kernel-backend attention.decode=two,auto"),
        (
            ("attention", "attention.decode.bfloat16"),
            "--kernel-backend attention.decode.bfloat16=two,auto",
        ),
        (("attention.decode", "attention.0-3"), "--kernel-backend attention.0-3=two,auto"),
    ],
)
def test_what_is_told_for_another_kernel_stands_beside_a_wider_wish_and_in_place_of_one_as_narrow(
    wishes: tuple[str, ...], told: str
) -> None:
    asked = {scope: wish(scope, "one") for scope in wishes}
    selector = Selector(KERNELS, CPU, list(asked.values()))
    selector.select_attention(PROBLEM, layer=1)
    (planned,) = selector.plan().ops
    assert told == next(v.reasons[0].mend for v in planned.verdicts if v.backend == "two")
    flag, names = told.replace("=", " ").removeprefix("--kernel-backend ").split()
    scope = flag.removeprefix("--").replace("-backend", "")
    again = Selector(KERNELS, CPU, [*{**asked, scope: wish(scope, *names.split(","))}.values()])
    assert again.select_attention(PROBLEM, layer=1).spec.backend == "two"


def test_what_is_told_for_a_kernel_leaves_problems_of_its_op_to_others_which_it_does_not_fit() -> (
    None
):
    narrow = kernel("narrow", "greedy", capability=Capability(("cpu",), ("float32",)))
    selector = Selector(
        (kernel("first", "greedy", capability=ANYWHERE), narrow), CPU, [wish("greedy", "first")]
    )
    selector.select("greedy", LOGITS)
    (planned,) = selector.plan().ops
    (reason,) = next(v.reasons for v in planned.verdicts if v.backend == "narrow")
    scope, _, names = reason.mend.removeprefix("--kernel-backend ").partition("=")
    again = Selector(selector.kernels, CPU, [wish(scope, *names.split(","))])
    taken = [
        again.select("greedy", {**LOGITS, "dtype": dtype}).spec.backend
        for dtype in ("float32", "bfloat16")
    ]
    assert taken == ["narrow", "first"]


def test_nothing_is_told_for_a_second_kernel_of_one_name_which_no_flag_takes() -> None:
    selector = Selector(
        (kernel("plain", "greedy"), kernel("plain", "greedy", load="builtins:print")), CPU
    )
    selector.select("greedy", LOGITS)
    (planned,) = selector.plan().ops
    ((reason,),) = [verdict.reasons for verdict in planned.verdicts if verdict.reasons]
    assert (reason.what, reason.mend) == ("dist-plain serves this name first", "")


@pytest.mark.parametrize("names", [("auto", "one"), ("one", "auto", "two"), ("auto", "auto")])
def test_a_name_after_auto_which_would_never_be_tried_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^--kernel-backend attention \S+: auto takes any that fits; put it last$",
    ):
        wish("attention", *names)


def test_what_is_told_where_nothing_was_taken_leaves_what_was_asked_for_to_other_ops_of_the_flag() -> (
    None
):
    kernels = (kernel("fast", "greedy"), kernel("plain", "greedy"), kernel("plain", "sample"))
    with pytest.raises(NothingFitsError) as caught:
        Selector(kernels, CPU, [wish("sampling", "fast")]).select("sample", LOGITS, layer=3)
    (planned,) = caught.value.plan.ops
    assert (planned.without(), planned.layers) == (
        "--kernel-backend sampling=fast,plain,auto",
        (3,),
    )
    again = Selector(kernels, CPU, [wish("sampling", "fast", "plain", "auto")])
    assert [again.select(op, LOGITS).spec.backend for op in ("greedy", "sample")] == [
        "fast",
        "plain",
    ]


@pytest.mark.parametrize(
    ("asked", "told"), [((), "slow,auto"), (("fast", "auto"), "fast,slow,auto")]
)
def test_what_auto_passes_over_is_told_by_its_name_where_nothing_else_fits(
    asked: tuple[str, ...], told: str
) -> None:
    kernels = (
        kernel("fast", "greedy", requires=("no_such_library",)),
        kernel("slow", "greedy", needs_compile=True),
    )
    with pytest.raises(
        NothingFitsError,
        match=rf"backends that fit: slow; `--kernel-backend greedy={told}` takes one",
    ):
        Selector(kernels, CPU, [wish("greedy", *asked)] if asked else []).select("greedy", LOGITS)
    assert (
        Selector(kernels, CPU, [wish("greedy", *told.split(","))])
        .select("greedy", LOGITS)
        .spec.backend
        == "slow"
    )


def test_an_op_of_a_vendors_name_is_asked_for_by_it() -> None:
    assert wish("acme/op.decode", "one").target == "acme/op"


@st.composite
def scopes(draw: st.DrawFn) -> str:
    first = draw(st.integers(0, NUM_LAYERS - 1))
    layers = draw(
        st.sampled_from(["", f".{first}", f".{first}-{draw(st.integers(first, NUM_LAYERS - 1))}"])
    )
    phase, dtype = (
        draw(st.sampled_from(["", ".prefill", ".decode"])),
        draw(st.sampled_from(["", ".bfloat16"])),
    )
    return f"attention{phase}{dtype}{layers}"


@given(
    st.lists(
        st.tuples(scopes(), st.sampled_from(NAMES)), max_size=4, unique_by=lambda each: each[0]
    )
)
def test_every_layer_and_phase_gets_what_the_narrowest_wish_says_or_the_clash_is_an_error(
    asked: list[tuple[str, str]],
) -> None:
    wishes = [wish(scope, name) for scope, name in asked]
    expected: dict[tuple[str, int], str] = {}
    clash = False
    for phase, layer in itertools.product(PHASES, range(NUM_LAYERS)):
        fitting = [
            each
            for each in wishes
            if each.phase in (None, phase) and (each.layers is None or layer in each.layers)
        ]
        best = max(
            (
                ((w.layers is not None, w.phase is not None, w.dtype is not None), w.backends[0])
                for w in fitting
            ),
            default=((False,) * 3, "five"),  # distributions go by name
        )
        shapes = [(w.layers is not None, w.phase is not None, w.dtype is not None) for w in fitting]
        clash |= shapes.count(best[0]) > 1
        expected[phase, layer] = best[1]
    for order in (wishes, wishes[::-1]):
        selector = Selector(KERNELS, CPU, order)
        if clash:
            with pytest.raises(SelectionError, match="both speak of attention"):
                model(selector)
        else:
            assert model(selector) == expected
            selector.check()


FORMATS = tuple(
    OpContract(name, "moe", "", {}, "a.b:c", "a.b:d", ())
    for name in ("experts", "experts_fp8", "experts_nvfp4")
)


def test_a_format_narrows_a_family_to_the_ops_that_are_named_after_it() -> None:
    kernels = [kernel(backend, each.name) for each in FORMATS for backend in ("one", "two")]
    selector = Selector(kernels, CPU, [wish("moe.fp8", "two")], ops=merge_ops(FORMATS))
    backends = {
        each.name: selector.select(each.name, {"dtype": "bfloat16"}).spec.backend
        for each in FORMATS
    }
    assert backends == {"experts": "one", "experts_fp8": "two", "experts_nvfp4": "one"}
    selector.check()


def test_a_format_that_the_model_has_not_is_an_error_that_says_which_ops_there_are() -> None:
    selector = Selector(
        [kernel("one", "experts_fp8")], CPU, [wish("moe.nvfp4", "one")], ops=merge_ops(FORMATS)
    )
    selector.select("experts_fp8", {"dtype": "bfloat16"})
    with pytest.raises(
        SelectionError,
        match=r"moe.nvfp4 has no effect: moe is asked for as experts_fp8, with phase",
    ):
        selector.check()


@pytest.mark.parametrize(
    ("short", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_a_dtype_may_be_typed_in_short(short: str, dtype: str) -> None:
    assert Override.parse(f"attention.{short}", ("one",)).dtype == dtype
    assert Override.parse(f"attention.decode.{short}.0-3", ("one",)).dtype == dtype


def test_one_op_goes_before_its_family() -> None:
    kernels = (*KERNELS, kernel("fast", "greedy"), kernel("fast", "sample"))
    selector = Selector(kernels, CPU, [wish("sampling", "plain"), wish("greedy", "fast")])
    assert selector.select("greedy", LOGITS).spec.backend == "fast"
    assert selector.select("sample", LOGITS).spec.backend == "plain"
    selector.check()


def test_the_plan_tells_which_layers_each_wish_took() -> None:
    selector = Selector(KERNELS, CPU, [wish("attention.1-2", "two")])
    model(selector)
    found = {(planned.backend, planned.layers) for planned in selector.plan().find("attention")}
    assert found == {("two", (1, 2)), ("five", (0, 3, 4, 5))}
    table = selector.plan().table()
    assert "prefill, decode, layers 1-2" in table
    assert "prefill, decode, layers 0, 3-5" in table


@pytest.mark.parametrize(
    "scope",
    [
        "attention.later",
        "attention.0.decode",
        "attention.decode.decode",
        "attention.",
        "",
        ".decode",
        "attention.-3",
        "attention.3-",
        "a b",
    ],
)
def test_a_scope_that_is_none_is_refused_with_the_form(scope: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"must read OP\[\.PHASE\]\[\.DTYPE\]\[\.LAYERS\].* prefill, decode; a dtype",
    ):
        wish(scope, "one")


@pytest.mark.parametrize(
    ("scope", "said"),
    [
        (
            "attention.6-9",
            "attention is asked for with phase decode, prefill; dtype bfloat16; layers 0-5",
        ),
        ("attention.3-1", "layers 0-5"),
        ("attention.9", "layers 0-5"),
        ("attention.float16", "dtype bfloat16"),
        ("greedy.decode", "greedy is asked for with phase none; dtype float32"),
        ("greedy.0", "layers none"),
        ("sample", "the model asks for no sample, but for attention, greedy"),
        ("moe", "the model asks for no moe, but for attention, greedy"),
    ],
)
def test_a_wish_that_nothing_matches_is_an_error_that_says_what_there_is(
    scope: str, said: str
) -> None:
    selector = Selector(
        KERNELS, CPU, [wish(scope, "one" if scope.startswith("attention") else "plain")]
    )
    model(selector)
    with pytest.raises(SelectionError) as caught:
        selector.check()
    assert f"--kernel-backend {scope} has no effect: " in str(caught.value)
    assert said in str(caught.value)


def test_layers_that_reach_beyond_the_last_are_an_error_that_says_which_that_is() -> None:
    selector = Selector(KERNELS, CPU, [wish("attention.4-99", "one")])
    model(selector)
    said = r"--kernel-backend attention\.4-99 goes beyond the last layer, 5: attention is asked for with .*layers 0-5"
    with pytest.raises(SelectionError, match=said):
        selector.check()


# -- fused ops ----------------------------------------------------------------------------------------------

FUSED = OpContract(
    "both", "sampling", "", {"vocab_size": ""}, "a.b:c", "a.b:d", (), parts=("greedy", "sample")
)


def test_a_fused_op_that_was_named_and_does_not_fit_is_an_error_and_with_auto_its_parts_run() -> (
    None
):
    unfit = kernel("fast", "both", capability=Capability(("cuda",), ("float32",)))
    ops = merge_ops((FUSED,))
    with pytest.raises(
        SelectionError, match=r"both'(.|\n)*--kernel-backend both asks for fast(.|\n)*runs on cuda"
    ):
        Selector((*KERNELS, unfit), CPU, [wish("both", "fast")], ops=ops).select_all(
            FUSED.parts, LOGITS
        )
    choices = Selector((*KERNELS, unfit), CPU, [wish("both", "fast", "auto")], ops=ops).select_all(
        FUSED.parts, LOGITS
    )
    assert [choice.spec.op for choice in choices] == ["greedy", "sample"]


def test_a_wish_for_a_part_is_heeded_where_a_fused_op_would_have_run_instead() -> None:
    kernels, ops = (*KERNELS, kernel("fast", "both")), merge_ops((FUSED,))
    assert len(Selector(kernels, CPU, ops=ops).select_all(FUSED.parts, LOGITS)) == 1
    parted = Selector(kernels, CPU, [wish("greedy", "plain")], ops=ops)
    assert [choice.spec.op for choice in parted.select_all(FUSED.parts, LOGITS)] == [
        "greedy",
        "sample",
    ]
    parted.check()


# -- explicit and unmet -------------------------------------------------------------------------------------

UNFIT = {
    "dtype": (
        {"capability": replace(ANYWHERE, dtypes=("float16",))},
        "dtype bfloat16 is not among float16",
    ),
    "platform": (
        {"capability": replace(ANYWHERE, platforms=("cuda",))},
        "it runs on cuda, and the device is cpu",
    ),
    "phase": (
        {"capability": replace(ANYWHERE, phases=("prefill",))},
        "phase decode is not among prefill",
    ),
    "library": ({"requires": ("no_such_library",)}, "module 'no_such_library' is not installed"),
    "broken": (
        {"load": "no_such_package.x:y", "requires": ("json",)},
        "it does not load: ModuleNotFoundError",
    ),
    "schema": ({"options": "no_such_package.x:Y"}, "it does not load: ModuleNotFoundError"),
    "no_model": (
        {"options": "json:loads"},
        "it does not load: TypeError: json:loads is no pydantic model",
    ),
}


@given(st.lists(st.sampled_from(sorted(UNFIT)), min_size=1, unique=True), st.booleans())
def test_named_backends_that_cannot_serve_are_an_error_with_every_reason_and_auto_is_no_part_of_it(
    names: list[str], has_auto: bool
) -> None:
    kernels = [*KERNELS, *(kernel(name, **UNFIT[name][0]) for name in UNFIT)]
    asked = wish("attention", *names, *(["auto"] if has_auto else []))
    selector = Selector(kernels, CPU, [asked])
    if has_auto:
        assert selector.select_attention(PROBLEM).spec.backend in NAMES
        return
    with pytest.raises(SelectionError) as caught:
        selector.select_attention(PROBLEM)
    message = str(caught.value)
    assert f"--kernel-backend attention asks for {', '.join(names)}" in message
    for name in names:
        (line,) = (
            line for line in message.splitlines() if line.startswith(f"  {name} (dist-{name}): ")
        )
        assert UNFIT[name][1] in line
    fitting, _, advice = (
        message.splitlines()[-1].removeprefix("  backends that fit: ").partition("; ")
    )
    assert set(NAMES) <= set(fitting.split(", "))
    flag = f"--kernel-backend attention={','.join(names)},{fitting.partition(',')[0]},auto"
    assert advice == f"`{flag}` takes one where what was asked for cannot"


@given(st.permutations([*UNFIT, *NAMES]))
def test_of_a_list_the_first_that_fits_is_taken(names: list[str]) -> None:
    kernels = [*KERNELS, *(kernel(name, **UNFIT[name][0]) for name in UNFIT)]
    taken = (
        Selector(kernels, CPU, [wish("attention", *names)]).select_attention(PROBLEM).spec.backend
    )
    assert taken == next(name for name in names if name in NAMES)


# -- the table ----------------------------------------------------------------------------------------------


def test_the_table_fits_eighty_columns_and_a_screen_whatever_the_reasons() -> None:
    kernels = [*KERNELS, *(kernel(f"{name}-of-a-vendor", **UNFIT[name][0]) for name in UNFIT)]
    selector = Selector(kernels, CPU, [wish("attention.1-2", "two")])
    model(selector)
    lines = selector.plan().table().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "not library-of-a-vendor: module 'no_such_library' is not installed (attention)" in lines
    assert lines[-1] == "and 12 reasons more: `tokenspeed plugins why OP` tells all"


def test_the_table_says_of_every_row_all_phases_layers_and_options_and_reasons_make_room() -> None:
    options = kernel("tiled-of-a-vendor", options=f"{__name__}:Options")
    others = [kernel(f"{name}-of-a-vendor", **UNFIT[name][0]) for name in UNFIT]
    wishes = [wish("attention.decode.0-1", "tiled-of-a-vendor"), wish("attention.decode.3", "two")]
    selector = Selector(
        [*KERNELS, options, *others], CPU, wishes, options={"tiled-of-a-vendor.tile": "32"}
    )
    model(selector)
    lines = selector.plan().table().splitlines()
    rows = " ".join(
        " ".join(
            lines[2 : next(i for i, line in enumerate(lines) if line.startswith("not "))]
        ).split()
    )
    assert "tiled-of-a-vendor dist-tiled-of-a-vendor decode, layers 0-1, tile=32 " in rows
    assert "two dist-two decode, layers 3" in rows
    assert "five dist-five prefill, decode, layers 0-5 " in rows
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
