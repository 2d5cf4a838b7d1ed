"""Conformance of a kernel, as a class to inherit: set `spec = MINE`.

Each test runs on every declared device of this machine, and is skipped if there is none.
"""

from __future__ import annotations

from itertools import product
from typing import ClassVar
from unittest import SkipTest

import torch

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import KernelSpec, PlatformInfo
from tokenspeed_core.api.ops import OpContract, Problem
from tokenspeed_core.kernels.select import has_module
from tokenspeed_testing import attention as of_attention
from tokenspeed_testing import conformance
from tokenspeed_testing.boundaries import boundary_cases
from tokenspeed_testing.cases import NotRun, beyond, cases
from tokenspeed_testing.large_steps import check_large_steps
from tokenspeed_testing.replays import replays
from tokenspeed_testing.selection import DOES_NOT_LOAD, SpecUnderTest
from tokenspeed_testing.shapes import contract_of

_PREFILL = of_attention.Rows((1, 9, 4), (30, 9, 21))
_DECODE = of_attention.Rows((1, 1, 1), (33, 7, 16))
_LARGE_NUM_ROWS = (300, 2100)
_FEW = 3  # rows in the run of each case
_MANY = (33, 130)  # rows in the runs that check batch invariance


class KernelConformance:
    """Checks of a kernel. Subclasses set `spec`, and `contract` if the op is not installed."""

    spec: ClassVar[KernelSpec]
    contract: ClassVar[OpContract | None] = None

    def test_agrees_with_reference(self) -> None:
        """Odd shapes, no rows, strided inputs, poisoned memory."""
        for device in self._devices():
            if self.spec.op == "attention":
                assert of_attention.check_attention(self.spec, device), (
                    "the spec declares no problem that the kit has"
                )
            else:
                conformance.check(self.spec, device, contract=self._contract())

    def test_declared_cases_run(self) -> None:
        """Every pair of declared values on a CPU, every combination on a GPU."""
        for device in self._devices():
            problems = list(cases(self.spec, self._contract(), pairs_only=device.type == "cpu"))
            assert problems, (
                f"{self.spec.backend} declares no problem of op {self.spec.op!r} that the kit can make"
            )
            for problem in problems:
                self._computes(problem, device, "declares")

    def test_large_steps_agree_with_the_reference(self) -> None:
        """Long contexts, wide chunks, many rows, high block ids and large scores."""
        if self.spec.op != "attention":
            raise SkipTest("the op is not attention")
        for device in self._devices():
            assert check_large_steps(self.spec, device), "the spec declares no problem of the kit"

    def test_many_rows_agree_with_the_reference(self) -> None:
        """More rows than the other tests have, for ops with independent rows."""
        contract = self._contract()
        if not contract.rows or {"max_rows", "min_rows"} & set(contract.axes):
            raise SkipTest("the op has no independent rows, or limits their number")
        for device in self._devices():
            problem = next(cases(self.spec, contract, pairs_only=True))
            kernel = self.spec.factory()(problem)
            for num_rows in _LARGE_NUM_ROWS:
                conformance.agrees_with_reference(
                    kernel, contract, problem, num_rows, device, strided=False
                )

    def test_open_axes_hold_at_their_boundaries(self) -> None:
        """The kernel works for all values that its spec does not exclude: size 1, odd and large
        sizes, any scale, FP8 caches.
        """
        contract = self._contract()
        for device in self._devices():
            for problem in boundary_cases(self.spec, contract):
                if contract.name == "attention" or conformance.is_defined(
                    contract, problem, _FEW, device
                ):
                    self._computes(problem, device, "does not exclude")

    def test_declared_hardware_is_present(self) -> None:
        """Skipped if a declared device or library is missing, with the number of affected cases."""
        lacks = self._lacks()
        if lacks:
            pairs_only = self.spec.capability.platforms == ("cpu",)
            num_cases = sum(1 for _ in cases(self.spec, self._contract(), pairs_only=pairs_only))
            raise NotRun(num_cases, " and ".join(lacks))

    def test_values_beyond_limits_are_refused(self) -> None:
        """Selection refuses the nearest undeclared problems, hardware and features, and names the limit.

        It accepts everything that is declared.
        """
        contract, here = self._contract(), self._declared_platform()
        asked, inside = (
            SpecUnderTest(self.spec, contract),
            next(cases(self.spec, contract, pairs_only=True), None),
        )
        refusals = [
            (f"{what} is", asked.refusals(problem, here))
            for what, problem in beyond(self.spec, contract)
        ]
        assert inside is not None
        for feature in sorted({"graph_safe", "batch_invariant"} - self.spec.capability.features):
            refusals.append(
                (
                    f"the feature {feature} is not supported",
                    asked.refusals(inside, here, frozenset({feature})),
                )
            )
        for platform, expected in self._other_platforms():
            refusals.append((expected, asked.refusals(inside, platform)))
        for expected, reasons in refusals:
            why = "; ".join(reasons) or "nothing, and taken"
            assert any(reason.startswith(expected) for reason in reasons), (
                f"not refused because '{expected} …', but for {why}"
            )
        reasons = asked.refusals(inside, here)
        left = [each for each in reasons if not (each.startswith(DOES_NOT_LOAD) and self._lacks())]
        assert not left, (
            f"the spec declares {dict(inside)}, but selection refuses it: {'; '.join(left)}"
        )

    def test_batch_invariance(self) -> None:
        """Rows have the same bits alone and among others, if declared."""
        if "batch_invariant" not in self.spec.capability.features:
            raise SkipTest("the kernel does not declare batch_invariant")
        for device in self._devices():
            for problem in cases(self.spec, self._contract(), pairs_only=True):
                if self.spec.op == "attention":
                    of_attention.ignores_other_rows(
                        self.spec.factory(), AttentionProblem(**problem), device
                    )
                else:
                    kernel = self.spec.factory()(problem)
                    conformance.repeats(kernel, self._contract(), problem, 33, device)
                    for rows in _MANY:
                        conformance.ignores_other_rows(
                            kernel, self._contract(), problem, rows, device
                        )

    def test_cuda_graph_replay(self) -> None:
        """A captured call replays with other inputs, if declared.

        Without such a device the cases count as not run, and calls on the CPU are checked for
        synchronization.
        """
        if "graph_safe" not in self.spec.capability.features:
            raise SkipTest("the kernel does not declare graph_safe")
        if "cuda" not in self.spec.capability.platforms:
            raise SkipTest("the spec declares no device with graphs")
        problems = list(cases(self.spec, self._contract(), pairs_only=True))
        devices = [] if self._missing_modules() else self._here()
        for device, problem in product(devices, problems):
            if self.spec.op == "attention":
                replays(self.spec, AttentionProblem(**problem), device)
                if device.type == "cpu":
                    of_attention.never_synchronizes(
                        self.spec.factory(), AttentionProblem(**problem), device
                    )
            else:
                examine = (
                    conformance.replays if device.type == "cuda" else conformance.never_synchronizes
                )
                examine(self.spec.factory()(problem), self._contract(), problem, 33, device)
        if not any(device.type == "cuda" for device in devices):
            raise NotRun(len(problems), f"{' and '.join(self._lacks())}, for graphs")

    def _contract(self) -> OpContract:
        return self.contract or contract_of(self.spec)

    def _devices(self) -> list[torch.device]:
        """Return the declared devices of this machine. Raises SkipTest if there is none."""
        missing = self._missing_modules()
        if missing:
            raise SkipTest(
                f"{', '.join(missing)} is not installed; {self.spec.obtain or 'install it'}"
            )
        found = self._here()
        if not found:
            raise SkipTest(f"this machine lacks {' and '.join(self._missing_devices())}")
        return found

    def _here(self) -> list[torch.device]:
        return [
            torch.device(kind) for kind in self.spec.capability.platforms if self._is_here(kind)
        ]

    def _lacks(self) -> list[str]:
        return [
            *self._missing_devices(),
            *(f"the module {name}" for name in self._missing_modules()),
        ]

    def _missing_modules(self) -> list[str]:
        return [name for name in self.spec.requires if not has_module(name)]

    def _missing_devices(self) -> list[str]:
        declared = self.spec.capability
        return [
            _named(kind, declared.min_compute_capability, declared.max_compute_capability)
            for kind in declared.platforms
            if not self._is_here(kind)
        ]

    def _is_here(self, kind: str) -> bool:
        if kind != "cuda":
            return kind == "cpu"
        if not torch.cuda.is_available():
            return False
        low, high = (
            self.spec.capability.min_compute_capability,
            self.spec.capability.max_compute_capability,
        )
        found = torch.cuda.get_device_capability()
        return (low is None or low <= found) and (high is None or found <= high)

    def _computes(self, problem: Problem, device: torch.device, says: str) -> None:
        """Run a problem. Raises AssertionError for any exception of the kernel."""
        try:
            self._runs(problem, device)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(
                f"the spec {says} {dict(problem)}, but the kernel fails on {device}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _runs(self, problem: Problem, device: torch.device) -> None:
        if self.spec.op == "attention":
            of_attention.attends_once(
                self.spec.factory(),
                AttentionProblem(**problem),
                device,
                _DECODE if problem["phase"] == "decode" else _PREFILL,
            )
        else:
            kernel = self.spec.factory()(problem)
            conformance.agrees_with_reference(
                kernel, self._contract(), problem, _FEW, device, strided=False
            )

    def _declared_platform(self) -> PlatformInfo:
        declared = self.spec.capability
        return PlatformInfo(
            declared.platforms[0],
            declared.min_compute_capability or declared.max_compute_capability,
        )

    def _other_platforms(self) -> list[tuple[PlatformInfo, str]]:
        """Return undeclared devices, each with the start of its refusal."""
        declared = self.spec.capability
        low, high = declared.min_compute_capability, declared.max_compute_capability
        undeclared = [(low[0] - 1, 9)] if low is not None else []
        undeclared += [(high[0], high[1] + 1)] if high is not None else []
        kind = declared.platforms[0]
        return [
            (PlatformInfo("none"), "device none is"),
            *(
                (PlatformInfo(kind, each), f"compute capability {each[0]}.{each[1]} is")
                for each in undeclared
            ),
        ]


def _named(kind: str, low: tuple[int, int] | None, high: tuple[int, int] | None) -> str:
    """Return a declared device as text, such as "a device sm100 to sm103"."""
    if kind == "cpu" or (low is None and high is None):
        return f"a device {kind}"
    first, last = ("" if bound is None else f"sm{bound[0]}{bound[1]}" for bound in (low, high))
    if first == last:
        return f"a device {first}"
    if first and last:
        return f"a device {first} to {last}"
    return f"a device {first} or newer" if first else f"a device {last} or older"
