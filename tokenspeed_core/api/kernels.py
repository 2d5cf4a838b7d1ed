"""Kernel descriptors: the problems and devices that a kernel supports, and where its code is.

Descriptors import no tensor library. Selection reads all of them and loads only the chosen kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenspeed_core.targets import load_target

if TYPE_CHECKING:
    from pydantic import BaseModel

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
PHASES = ("prefill", "decode")
FEATURES = (
    "window",
    "chunked",
    "soft_cap",
    "sinks",
    "value_head_size",
    "bidirectional",
    "shared_prefix",
    "graph_safe",
    "batch_invariant",
)
"""`window`: sliding-window attention. `chunked`: attention within chunks. `soft_cap`: attention with capped scores.
`sinks`: attention with sinks. `value_head_size`: values of another size than keys. `bidirectional`: prompts without a
causal mask. `shared_prefix`: `mla_decode` reads cache entries only once for a group of rows that shares them; the result of
`find_shared_prefix` is passed to such kernels only. `graph_safe`: a captured call can replay on new data of the same shapes;
once the kernel has run, its first call with another number of rows can be captured, so it allocates with PyTorch only.
`batch_invariant`: a row's bits do not depend on other rows."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)?\Z")  # name, or vendor/name
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")


@dataclass(frozen=True, slots=True)
class PlatformInfo:
    """The device that kernels are selected for.

    `kind` is the device type ("cpu", "cuda", …); `compute_capability` is (major, minor) for kinds that have one;
    `name` is for display.
    """

    kind: str
    compute_capability: tuple[int, int] | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class AxisLimit:
    """Bounds of one axis of the problem: an inclusive range, and a required divisor.

    Raises ValueError if no number satisfies it.
    """

    axis: str
    minimum: int = 0
    maximum: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if self.multiple_of < 1 or self.minimum < 0:
            raise ValueError(
                f"axis {self.axis!r}: multiple_of must be at least 1, and minimum at least 0"
            )
        if (
            self.maximum is not None
            and self.maximum // self.multiple_of * self.multiple_of < self.minimum
        ):
            raise ValueError(f"axis {self.axis!r}: no value satisfies {self}")

    def refusal(self, value: int) -> str | None:
        """Return why a value is out of bounds, None if it is within them."""
        if value < self.minimum:
            return f"{self.axis} {value} is below {self.minimum}"
        if self.maximum is not None and value > self.maximum:
            return f"{self.axis} {value} is above {self.maximum}"
        if value % self.multiple_of:
            return f"{self.axis} {value} is not a multiple of {self.multiple_of}"
        return None


@dataclass(frozen=True, slots=True)
class Capability:
    """The problems that a kernel supports. An empty tuple or None means no restriction.

    `min_` and `max_compute_capability` are inclusive. `features` are optional abilities (see FEATURES). Raises
    ValueError for unknown names and empty ranges.
    """

    platforms: tuple[str, ...]
    dtypes: tuple[str, ...]
    min_compute_capability: tuple[int, int] | None = None
    max_compute_capability: tuple[int, int] | None = None
    kv_dtypes: tuple[str, ...] = ()
    head_sizes: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    phases: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()
    limits: tuple[AxisLimit, ...] = ()

    def __post_init__(self) -> None:
        if not self.platforms or not self.dtypes:
            raise ValueError("a capability needs at least one platform and one dtype")
        _known("dtype", (*self.dtypes, *self.kv_dtypes), DTYPES)
        _known("phase", self.phases, PHASES)
        _known("feature", tuple(self.features), FEATURES)
        low, high = self.min_compute_capability, self.max_compute_capability
        if low is not None and high is not None and low > high:
            raise ValueError(f"compute capability range {low} to {high} is empty")
        if any(size < 1 for size in (*self.head_sizes, *self.block_sizes)):
            raise ValueError("head and block sizes must be positive")

    def breadth(self) -> tuple[int, float]:
        """Return a sort key: fewer platforms first, then the narrower hardware range."""
        low, high = self.min_compute_capability, self.max_compute_capability
        bounds = (low is not None) + 2 * (high is not None)
        span = (
            high[0] - low[0] + (high[1] - low[1]) / 16
            if low is not None and high is not None
            else 0.0
        )
        return len(self.platforms), (3 - bounds) * 1000 + span


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One implementation of an op: an entry point of `tokenspeed.kernels.<family>` named after its backend.

    Raises ValueError for invalid fields.
    """

    op: str
    backend: str
    capability: Capability
    # "module:factory". `factory(problem)` returns the callable that the op's contract describes; for attention,
    # `factory(problem, limits, device)`.
    load: str
    requires: tuple[str, ...] = ()  # top-level modules that must be installed
    obtain: str = ""  # the command that installs them
    # On a new machine, the kernel needs a compiler toolchain, or minutes of compilation, before its first call.
    # Just-in-time compilation that takes seconds during the warm-up does not count.
    needs_compile: bool = False
    # `auto` does not choose it, even if a ranking lists its backend, because no ranking covers this kernel yet.
    needs_name: bool = False
    # This is the op's reference, the last candidate of all. `load` must be the contract's `reference`.
    reference: bool = False
    # "module:Model", a pydantic model for `--backend-option`. The factory then takes an instance as the keyword
    # `options`.
    options: str = ""
    # `plugins why` shows it if this kernel is selected, such as that another kernel runs some steps.
    note: str = ""

    def __post_init__(self) -> None:
        for what, name in (("op", self.op), ("backend", self.backend)):
            if not _NAME.match(name):
                raise ValueError(
                    f"{what} {name!r} must be 'name' or 'vendor/name', of a-z, 0-9, '_', '-' and '.'"
                )
        if self.backend == "auto":
            raise ValueError("the backend name 'auto' is reserved; choose another name")
        for target in (self.load, self.options or self.load):
            if not _TARGET.match(target):
                raise ValueError(f"{target!r} must have the form 'module:attribute'")
        for module in self.requires:
            if not module.isidentifier():
                raise ValueError(f"required module {module!r} must be a top-level module")

    def schema(self) -> type[BaseModel] | None:
        """Import and return the model of the options, None without options. Raises TypeError for another type."""
        schema = load_target(self.options) if self.options else None
        if schema is not None and not hasattr(schema, "model_fields"):
            raise TypeError(f"{self.options} is not a pydantic model")
        return schema

    def factory(self, options: BaseModel | None = None) -> Callable[..., Any]:
        """Import the implementation and return its factory, bound to its options (None: the defaults)."""
        factory: Callable[..., Any] = load_target(self.load)
        schema = self.schema()
        return (
            factory
            if schema is None
            else partial(factory, options=schema() if options is None else options)
        )


@dataclass(frozen=True, slots=True)
class Ranking:
    """The measured order of an op's backends on one compute capability, the fastest first.

    `phase` is None for ops without phases. `figures` are pairs of a backend and a description of its measurement.
    """

    op: str
    phase: str | None
    compute_capability: tuple[int, int]
    figures: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class AutoDistribution:
    """A distribution with kernels that `auto` may choose without a measured ranking.

    Only the default distributions may declare one, in an entry of `tokenspeed.rankings`.
    """

    name: str


def _known(what: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for word in given:
        if word not in known:
            raise ValueError(f"unknown {what} {word!r}; known: {', '.join(known)}")
