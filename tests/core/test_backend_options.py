"""Backend options: the plugin's schema parses them, and the backend gets them or the user an error."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import Capability, KernelSpec, PlatformInfo
from tokenspeed_core.errors import SelectionError
from tokenspeed_core.kernels.installed import InstalledKernel
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.kernels.table import kernel_table

PROBLEM = AttentionProblem("decode", 8, 2, 64, "bfloat16", "bfloat16", 16, 0.125, None)


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tile: int = Field(16, ge=1, description="rows of a tile")
    loud: bool = Field(False, description="whether it shouts")


class Exclusive(BaseModel):
    """Options of which each is valid alone, but not both together."""

    window: int = 1
    mode: str = "wide"

    @model_validator(mode="after")
    def _fit(self) -> Exclusive:
        if self.mode == "narrow" and self.window > 100:
            raise ValueError("a narrow mode takes windows of at most 100")
        return self


class Raising(BaseModel):
    tile: int = 1

    @field_validator("tile")
    @classmethod
    def _raise(cls, tile: int) -> int:
        raise {2: RuntimeError("boom"), 3: SystemExit(4)}[tile]


class Renamed(BaseModel):
    win: int = Field(1, alias="window", description="tokens seen")
    either: int = Field(1, validation_alias="other")


class Required(BaseModel):
    must: int
    may: int = 1


class Structured(BaseModel):
    names: list[str] = []
    sizes: tuple[int, ...] | None = None
    weights: dict[str, float] = {}
    text: str = ""


def make(problem: Any, *, options: BaseModel) -> BaseModel:
    return options


def kernel(backend: str, options: str = "") -> InstalledKernel:
    schema = options and (options if ":" in options else f"{__name__}:{options}")
    can = Capability(("cpu",), ("float32", "bfloat16"))
    return InstalledKernel(
        KernelSpec("attention", backend, can, f"{__name__}:make", options=schema), f"dist-{backend}"
    )


def selector_for(
    options: dict[str, Any], schema: str = "Options", backends: tuple[str, ...] = ("tiled",)
) -> Selector:
    """Return a selector with an override for `backends`. Only the backend `tiled` has the schema."""
    kernels = (kernel("tiled", schema), kernel("plain"))
    return Selector(
        kernels, PlatformInfo("cpu"), [Override.parse("attention", backends)], options=options
    )


def refusal_of(
    options: dict[str, Any], schema: str = "Options", backends: tuple[str, ...] = ("tiled",)
) -> str:
    with pytest.raises(SelectionError) as caught:
        selector_for(options, schema, backends).select_attention(PROBLEM)
    return str(caught.value)


def test_chosen_backend_gets_its_validated_options() -> None:
    selector = selector_for({"tiled.tile": "32", "tiled.loud": "true"})
    choice = selector.select_attention(PROBLEM)
    assert choice.spec.factory(choice.options)(None) == Options(tile=32, loud=True)
    selector.check()
    (planned,) = json.loads(selector.plan().to_json())["ops"]
    assert planned["options"] == [["tile", 32], ["loud", True]]
    assert "tile=32, loud=True" in kernel_table(selector.plan())


def test_options_default_to_the_schemas() -> None:
    selector = selector_for({})
    choice = selector.select_attention(PROBLEM)
    assert choice.options == choice.spec.factory()(None) == Options()
    assert selector.plan().ops[0].options == ()


def test_option_uses_its_alias() -> None:
    selector = selector_for({"tiled.window": "3"}, "Renamed")
    assert selector.select_attention(PROBLEM).options == Renamed(window=3)
    selector.check()
    assert selector.plan().ops[0].options == (("window", 3),)


def test_unknown_key_of_a_schema_is_refused() -> None:
    selector = selector_for({"tiled.win": "3", "tiled.other": "4"}, "Renamed")
    assert selector.select_attention(PROBLEM).options == Renamed(other=4)
    with pytest.raises(
        SelectionError, match=r"tiled\.win .*tiled.window: tokens seen; tiled.other"
    ):
        selector.check()


def test_required_option_must_be_set() -> None:
    reason = (
        "  tiled (dist-tiled): it does not load: ValueError: its options: must: Field required\n"
    )
    assert reason in refusal_of({}, "Required")
    assert (
        refusal_of({"tiled.may": "2"}, "Required")
        == "--backend-option tiled.may=2: must: Field required"
    )
    assert selector_for({"tiled.must": "3"}, "Required").select_attention(
        PROBLEM
    ).options == Required(must=3)


def test_auto_skips_a_backend_with_missing_options() -> None:
    selector = selector_for({}, "Required", ("tiled", "auto"))
    assert selector.select_attention(PROBLEM).spec.backend == "plain"
    assert (
        "  tiled: it does not load: ValueError: its options: must: Field required ("
        in kernel_table(selector.plan())
    )


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ({"names": '["a,b", "c"]'}, Structured(names=["a,b", "c"])),
        ({"names": ["a", "b"]}, Structured(names=["a", "b"])),  # from Python or a file
        ({"sizes": "[16, 32]", "names": '["a"]'}, Structured(sizes=(16, 32), names=["a"])),
        ({"weights": '{"a": 0.5}'}, Structured(weights={"a": 0.5})),
        ({"text": "a,b"}, Structured(text="a,b")),
        ({"text": '"[a]"'}, Structured(text="[a]")),
    ],
)
def test_option_values_are_parsed_as_json_or_text(typed: dict[str, Any], read: Structured) -> None:
    options = {f"tiled.{key}": value for key, value in typed.items()}
    assert selector_for(options, "Structured").select_attention(PROBLEM).options == read


BOTH = "--backend-option tiled.window=200 --backend-option tiled.mode=narrow"


@pytest.mark.parametrize(
    ("schema", "typed", "expected"),
    [
        (
            "Options",
            {"tile": "0"},
            "--backend-option tiled.tile=0: tile: Input should be greater than or equal to 1",
        ),
        (
            "Options",
            {"tile": "wide"},
            "--backend-option tiled.tile=wide: tile: Input should be a valid integer, unable "
            "to parse string as an integer",
        ),
        (
            "Structured",
            {"sizes": '[1, "b"]'},
            '--backend-option tiled.sizes=[1, "b"]: sizes: 1: Input should be a valid '
            "integer, unable to parse string as an integer",
        ),
        (
            "Structured",
            {"names": "a,b"},
            "--backend-option tiled.names=a,b: names: Input should be a valid list",
        ),
        (
            "Structured",
            {"names": "[a"},
            "--backend-option tiled.names=[a: JSONDecodeError: Expecting value: line 1 "
            "column 2 (char 1)",
        ),
        (
            "Exclusive",
            {"window": "200", "mode": "narrow"},
            f"{BOTH}: Value error, a narrow mode takes windows of at most 100",
        ),
        ("Raising", {"tile": "2"}, "--backend-option tiled.tile=2: RuntimeError: boom"),
        ("Raising", {"tile": "3"}, "--backend-option tiled.tile=3: SystemExit: 4"),
    ],
)
@pytest.mark.parametrize("backends", [("tiled",), ("tiled", "auto")])
def test_invalid_option_is_refused(
    schema: str, typed: dict[str, Any], expected: str, backends: tuple[str, ...]
) -> None:
    assert (
        refusal_of({f"tiled.{key}": value for key, value in typed.items()}, schema, backends)
        == expected
    )


@pytest.mark.parametrize("name", ["tiled.tyle", "tile", "one.tile", "none.such", "plain.tile"])
def test_option_of_an_unused_backend_is_refused(name: str) -> None:
    selector = selector_for({name: "1"})
    selector.select_attention(PROBLEM)
    with pytest.raises(SelectionError) as caught:
        selector.check()
    assert f"--backend-option {name} " in str(caught.value)
    assert "tiled.tile: rows of a tile; tiled.loud: whether it shouts" in str(caught.value)


def test_option_without_description_is_listed_by_name() -> None:
    selector = selector_for({"tiled.tile": "1"}, "Exclusive")
    selector.select_attention(PROBLEM)
    with pytest.raises(SelectionError, match=r"tiled\.window; tiled\.mode\."):
        selector.check()


def test_schema_of_an_unused_backend_is_not_imported() -> None:
    sys.modules.pop("this", None)
    selector = selector_for({"tiled.x": "1"}, "this:Zen", ("plain",))
    selector.select_attention(PROBLEM)
    assert "this" not in sys.modules
    with pytest.raises(SelectionError, match=r"tiled\.x "):
        selector.check()
