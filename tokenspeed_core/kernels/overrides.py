"""The user's choice of backends: for which op, phase or number format, in order of preference."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenspeed_core.api.kernels import PHASES
from tokenspeed_core.api.ops import OpContract, Problem
from tokenspeed_core.errors import ConfigError

_SCOPE = re.compile(rf"([\w/-]+)(?:\.({'|'.join(PHASES)})|\.([a-z]+\d\w*))?\Z")
FORMAT_SUFFIX = re.compile(r"_([a-z]+\d\w*)\Z")  # of an op's name, such as linear_fp8
DTYPE_FORMATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Override:
    """Backends for an op or op family, best first. "auto" means the default order.

    Without "auto", no other backend is used for an op that one of them has; an override of a family does not apply to
    its other ops. `phase` or `format` restricts the override; None means any. A format is
    a dtype of the problem ("bf16") or the suffix of ops' names ("fp8" is `linear_fp8` in the family linear). `flag`
    is the flag as the user typed it. `for_draft` restricts it to the layers of the draft model, where it precedes all
    others.
    """

    target: str
    backends: tuple[str, ...]
    flag: str
    phase: str | None = None
    format: str | None = None
    for_draft: bool = False

    @classmethod
    def parse(
        cls, scope: str, backends: tuple[str, ...], flag: str = "", *, for_draft: bool = False
    ) -> Override:
        """Read a scope such as "add_rms_norm", "attention.decode" or "moe.fp8". Raises ConfigError."""
        flag = flag or f"--kernel-backend {scope}"
        match = _SCOPE.match(scope)
        if match is None:
            raise ConfigError(
                f"{flag}: expected OP, OP.PHASE or OP.FORMAT, such as attention.decode or moe.fp8. "
                f"Phases: {', '.join(PHASES)}."
            )
        if "auto" in backends[:-1]:
            raise ConfigError(
                f"{flag} {','.join(backends)}: backends after auto are never tried; put auto last."
            )
        target, phase, number_format = match.groups()
        return cls(target, backends, flag, phase, number_format, for_draft)

    def names_op(self, contract: OpContract) -> bool:
        """Return whether the target is this op and not its family."""
        return self.target == contract.name != contract.family

    def applies(self, contract: OpContract, problem: Problem) -> bool:
        """Return whether the override covers this problem."""
        if self.target not in (contract.family, contract.name):
            return False
        if self.phase not in (None, problem.get("phase")):
            return False
        if self.format is None or contract.name.endswith(f"_{self.format}"):
            return True
        return bool(problem["dtype"] == DTYPE_FORMATS.get(self.format))

    def specificity(self, contract: OpContract) -> tuple[bool, bool]:
        """Return a sort key: an op precedes its family, and an override with a phase or format precedes one without."""
        return self.names_op(contract), (self.phase or self.format) is not None


def flag_for(contract: OpContract, problem: Problem, override: Override | None) -> str:
    """Return the flag that would override a problem's backend.

    This is the flag of the current `override` unless a more specific one exists.
    """
    phase = problem.get("phase")
    scope = f"{contract.name}.{phase}" if phase else contract.name
    own = Override(contract.name, (), f"--kernel-backend {scope}", phase)
    if override is not None and override.specificity(contract) >= own.specificity(contract):
        return override.flag
    return f"--attention-backend.{phase}" if contract.name == "attention" else own.flag


def as_typed(flag: str, *backends: str) -> str:
    """Return a flag with backends as a user would type it, without the note on where its value came from."""
    flag = flag.partition(" (")[0]
    separator = "=" if flag.startswith("--kernel-backend") else " "
    return f"{flag}{separator}{','.join(backends)}"
