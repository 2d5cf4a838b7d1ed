"""Compile FlashInfer's modules for this machine's devices before serving, so that `auto` may choose attention."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch

from tokenspeed_kernels_flashinfer import ATTENTION
from tokenspeed_kernels_flashinfer.compiled import HOPPER, is_known

CAPABILITY = ATTENTION[-1].capability


def main(arguments: list[str]) -> None:
    """Parse arguments, compile, and print the modules and the time."""
    parser = argparse.ArgumentParser(
        prog="python -m tokenspeed_kernels_flashinfer", description=__doc__
    )
    parser.add_argument(
        "--head-size", type=int, choices=CAPABILITY.head_sizes, help="compile attention"
    )
    parser.add_argument("--experts", action="store_true", help="compile mixtures of experts")
    parser.add_argument("--dtype", choices=CAPABILITY.dtypes, default="bfloat16")
    parser.add_argument(
        "--kv-dtype",
        choices=CAPABILITY.kv_dtypes,
        help="dtype of the KV cache (default: same as --dtype)",
    )
    parser.add_argument("--window", action="store_true", help="compile sliding-window attention")
    given = parser.parse_args(arguments)
    if given.head_size is None and not given.experts:
        parser.error("nothing to compile. Give --head-size, --experts, or both.")
    if not is_known(installed := version("flashinfer-python")):
        parser.error(
            f"flashinfer-python {installed} uses module names that are not known here. "
            "Install a supported version: pip install 'tokenspeed-kernels-flashinfer[flashinfer]'"
        )
    start = time.monotonic()
    wanted = [experts_module()] if given.experts else []
    if given.head_size is not None:
        kv_dtype = given.kv_dtype or given.dtype
        wanted += modules(given.dtype, kv_dtype, given.head_size, has_window=given.window)
    names = build(wanted)
    print(*names, f"compiled or already there, {time.monotonic() - start:.0f} s", sep="\n")


def modules(dtype: str, kv_dtype: str, head_size: int, *, has_window: bool) -> list[Any]:
    """Return the library's build specs for both phases on the current device, without compiling."""
    backends = ["fa2"]
    if torch.cuda.get_device_capability() == HOPPER and dtype == kv_dtype:
        backends.append("fa3")
    make = import_module("flashinfer.jit.attention").gen_batch_prefill_module
    types = getattr(torch, dtype), getattr(torch, kv_dtype), getattr(torch, dtype), torch.int32
    found = [
        make(each, *types, head_size, head_size, 0, has_window, False, False) for each in backends
    ]
    return [*found, import_module("flashinfer.jit.cascade").gen_cascade_module()]


def experts_module() -> Any:
    """Return the library's build spec of experts on the current device, without compiling."""
    major, minor = torch.cuda.get_device_capability()
    # The library has no separate module for these.
    name = {110: 100, 121: 120}.get(10 * major + minor, 10 * major + minor)
    library = import_module("flashinfer.fused_moe")
    return getattr(library, f"gen_cutlass_fused_moe_sm{name}_module")()


def build(wanted: Iterable[Any]) -> list[str]:
    """Compile modules in parallel, unless they are compiled already. Return the names of all.

    Each is built as its first call would build it. `build_jit_specs` tracks compiled modules differently, so modules
    built by one would be built again by the other.
    """
    by_name = {module.name: module for module in wanted}
    with ThreadPoolExecutor(max_workers=len(by_name)) as pool:
        list(pool.map(_build, by_name.values()))
    return sorted(by_name)


def _build(module: Any) -> None:
    if not module.is_aot:  # already provided by flashinfer-jit-cache
        module.build(verbose=False, need_lock=True)


if __name__ == "__main__":
    main(sys.argv[1:])
