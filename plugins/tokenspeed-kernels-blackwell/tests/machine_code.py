"""Compile Triton kernels to machine code for a device that is not present, and read their resource usage."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_BYTES = 227 * 1024  # per program, on compute capability 10.0 and 10.3
REGISTERS = 65536  # per multiprocessor
TENSOR_COLUMNS = 512  # columns of tensor memory


@dataclass(frozen=True)
class MachineCode:
    """PTX, registers and stack bytes per thread, and shared memory bytes per program."""

    ptx: str
    num_registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_columns: int

    def count(self, instruction: str) -> int:
        """Return how often an instruction occurs in the PTX."""
        return self.ptx.count(instruction)


def compiled(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    at: Path,
    *,
    capability: int,
    aligned: tuple[str, ...],
    num_warps: int,
    num_stages: int,
) -> MachineCode:
    """Compile a kernel for a compute capability (100 for 10.0). `aligned` names arguments that are multiples of 16."""
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(
        kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, dict(constants), attributes
    )
    code = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    cubin = at / "kernel.cubin"
    cubin.write_bytes(code.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run(
        [tool, "-res-usage", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return MachineCode(
        code.asm["ptx"],
        int(found[1]),
        int(found[2]),
        code.metadata.shared,
        code.metadata.tmem_size or 0,
    )
