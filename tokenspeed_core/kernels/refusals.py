"""Why a kernel cannot be used: its declared capability compared with a device and a problem."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenspeed_core.api.kernels import Capability, PlatformInfo
from tokenspeed_core.api.ops import Problem
from tokenspeed_core.kernels.plan import Reason

_FLAGS = {"dtype": "--dtype", "block_size": "--block-size"}
_FEATURE_AXES = {
    "window": "window",
    "chunked": "is_chunked",
    "soft_cap": "soft_cap",
    "sinks": "has_sinks",
    "value_head_size": "value_head_size",
    "bidirectional": "is_bidirectional",
}


def hardware_refusals(capability: Capability, platform: PlatformInfo) -> Iterable[Reason]:
    """Yield every reason why a kernel does not run on a device."""
    if platform.kind not in capability.platforms:
        wanted = ", ".join(capability.platforms)
        yield Reason(
            f"device {platform.kind} is not supported (supported: {wanted})",
            f"use a {wanted} device",
        )
        return
    low, high = capability.min_compute_capability, capability.max_compute_capability
    found = platform.compute_capability
    if (low or high) and not (found and (low or found) <= found <= (high or found)):
        shown = "unknown" if found is None else _version(found)
        wanted = _version_range(low, high)
        yield Reason(
            f"compute capability {shown} is not supported (supported: {wanted})",
            f"use a device of compute capability {wanted}",
        )


def problem_refusals(
    capability: Capability, problem: Problem, needs: frozenset[str] = frozenset()
) -> Iterable[Reason]:
    """Yield every reason why a capability does not cover a problem with the features `needs`."""
    for axis, allowed in (
        ("dtype", capability.dtypes),
        ("kv_dtype", capability.kv_dtypes),
        ("head_size", capability.head_sizes),
        ("block_size", capability.block_sizes),
        ("phase", capability.phases),
    ):
        if axis in problem and allowed and problem[axis] not in allowed:
            supported = ", ".join(map(str, allowed))
            what = f"{axis} {problem[axis]} is not supported (supported: {supported})"
            yield Reason(what, _axis_hint(axis, problem["dtype"], allowed))
    for limit in capability.limits:
        value = problem.get(limit.axis)
        if value is not None and (refusal := limit.refusal(value)):
            yield Reason(refusal)
    axes = _FEATURE_AXES.items()
    needed = needs | {feature for feature, axis in axes if problem.get(axis) not in (None, False)}
    for feature in sorted(needed - capability.features):
        hint = "--enforce-eager" if feature == "graph_safe" else ""
        yield Reason(f"the feature {feature} is not supported", hint)


def _axis_hint(axis: str, dtype: str, allowed: tuple[Any, ...]) -> str:
    """Return the flags that set an axis to an allowed value, "" if there are none."""
    if axis != "kv_dtype":
        return f"{_FLAGS[axis]} {allowed[0]}" if axis in _FLAGS else ""
    if "float8_e4m3fn" in allowed:
        return "--kv-cache-dtype fp8_e4m3"
    fitting = [
        each
        for each in (dtype, *allowed)
        if each in allowed and each.endswith(("float16", "float32"))
    ]
    also = f" --dtype {fitting[0]}" if fitting and fitting[0] != dtype else ""
    return f"--kv-cache-dtype auto{also}" if fitting else ""


def _version_range(low: tuple[int, int] | None, high: tuple[int, int] | None) -> str:
    if low is None:
        return "any" if high is None else f"{_version(high)} or older"
    if high is None:
        return f"{_version(low)} or newer"
    return _version(low) if low == high else f"{_version(low)} to {_version(high)}"


def _version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
