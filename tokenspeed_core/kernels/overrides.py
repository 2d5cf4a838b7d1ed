"""What a user asks of backends: of which op, where it is computed, in which order of preference."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenspeed_core.api.kernels import PHASES
from tokenspeed_core.api.ops import OpContract, Problem
from tokenspeed_core.errors import ConfigError

_SCOPE = re.compile(
    rf"([\w/-]+)(?:\.({'|'.join(PHASES)}))?(?:\.([a-z]+\d\w*))?(?:\.(\d+)(?:-(\d+))?)?\Z"
)
FORMAT = re.compile(r"_([a-z]+\d\w*)\Z")  # that an op is named after, such as linear_fp8
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Override:
    """Backends of an op or op family, best first. "auto" stands for the host's own order.

    Without an "auto" nothing else is taken. `phase`, `dtype` and `layers` restrict it to such problems; None is
    any. A `dtype` is the problem's, or a format that ops are named after: "fp8" is `linear_fp8` of the family linear.
    `flag` is what the user typed.
    """

    target: str
    backends: tuple[str, ...]
    flag: str
    phase: str | None = None
    dtype: str | None = None
    layers: range | None = None

    @classmethod
    def parse(cls, scope: str, backends: tuple[str, ...], flag: str = "") -> Override:
        """Read a scope such as "add_rms_norm" or "attention.decode.0-3". Raises ConfigError."""
        flag = flag or f"--kernel-backend {scope}"
        match = _SCOPE.match(scope)
        if match is None:
            raise ConfigError(
                f"{flag}: must read OP[.PHASE][.DTYPE][.LAYERS], such as attention.decode.bf16.0-3; the phases are "
                f"{', '.join(PHASES)}; a dtype is one such as {', '.join(SHORT)} or fp8"
            )
        if "auto" in backends[:-1]:
            raise ConfigError(f"{flag} {','.join(backends)}: auto takes any that fits; put it last")
        target, phase, dtype, first, last = match.groups()
        layers = range(int(first), int(last or first) + 1) if first else None
        return cls(target, backends, flag, phase, SHORT.get(dtype, dtype), layers)

    def names_op(self, contract: OpContract) -> bool:
        """Say whether it speaks of this op alone, not of a family."""
        return self.target == contract.name != contract.family

    def applies(self, contract: OpContract, problem: Problem, layer: int | None) -> bool:
        """Say whether it speaks of this problem, of a layer if it is one's."""
        return (
            self.target in (contract.family, contract.name)
            and self.phase in (None, problem.get("phase"))
            and (self.dtype in (None, problem["dtype"]) or contract.name.endswith(f"_{self.dtype}"))
            and (self.layers is None or layer in self.layers)
        )

    def narrowness(self, contract: OpContract) -> tuple[bool, ...]:
        """How narrow it is, for ordering: for an op alone, then for layers, a phase, a dtype."""
        return (
            self.names_op(contract),
            *(axis is not None for axis in (self.layers, self.phase, self.dtype)),
        )


def flag_for(contract: OpContract, problem: Problem, wish: Override | None) -> str:
    """Return the flag for an op, of the problem's phase, or the user's `wish` for it where that is no wider."""
    phase = problem.get("phase")
    scope = f"{contract.name}.{phase}" if phase else contract.name
    own = Override(contract.name, (), f"--kernel-backend {scope}", phase)
    if wish is not None and wish.narrowness(contract) >= own.narrowness(contract):
        return wish.flag
    return f"--attention-backend.{phase}" if contract.name == "attention" else own.flag
