"""Selection of a spec among all installed kernels, if a user names its backend."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed_core.api.kernels import KernelSpec, PlatformInfo
from tokenspeed_core.api.ops import OpContract, Problem
from tokenspeed_core.kernels.installed import InstalledKernel, installed_kernels, installed_ops
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.plan import NothingFitsError
from tokenspeed_core.kernels.select import Selector
from tokenspeed_testing.installed import installed_catalog

DOES_NOT_LOAD = "it does not load"  # the start of selection's reason after a failed import


class SpecUnderTest:
    """Adds a spec to the installed kernels. It replaces kernels of the same op and name."""

    def __init__(self, spec: KernelSpec, contract: OpContract) -> None:
        """Read the installed kernels once."""
        catalog = installed_catalog()
        found = installed_kernels(catalog)
        mine = next(
            (each for each in found if each.spec == spec), InstalledKernel(spec, "under test")
        )
        others = [
            each for each in found if (each.spec.op, each.spec.backend) != (spec.op, spec.backend)
        ]
        self._kernels: Sequence[InstalledKernel] = (*others, mine)
        self._backend, self._op = spec.backend, contract.name
        self._ops = {**installed_ops(catalog), contract.name: contract}

    def refusals(
        self, problem: Problem, platform: PlatformInfo, needs: frozenset[str] = frozenset()
    ) -> tuple[str, ...]:
        """Return the reasons against the spec for a problem, or none if it is selected."""
        override = Override(self._op, (self._backend,), f"--kernel-backend {self._op}")
        selector = Selector(
            self._kernels,
            platform,
            (override,),
            ops=self._ops,
            needs=needs,
            module_exists=lambda name: True,
        )
        try:
            selector.select(self._op, problem)
        except NothingFitsError as error:
            (planned,) = error.plan.ops
            return tuple(
                reason.what
                for verdict in planned.verdicts
                if verdict.backend == self._backend
                for reason in verdict.reasons
            )
        return ()
