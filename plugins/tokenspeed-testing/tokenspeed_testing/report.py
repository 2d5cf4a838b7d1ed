"""Conformance checks of an installed distribution, and their results."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

from tokenspeed_core.api.grammars import GrammarSpec
from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.api.logits_processors import LogitsProcessorSpec
from tokenspeed_core.api.models import ModelSpec
from tokenspeed_core.api.parsers import ParserSpec
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry, Status
from tokenspeed_core.plugins.kinds import KERNELS_PREFIX
from tokenspeed_core.plugins.selection import Selection, normalize
from tokenspeed_testing.cases import NotRun
from tokenspeed_testing.distribution import DistributionConformance

# A small configuration in a family's package, which the suite builds.
EXAMPLE = Path("example", "config.json")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check: "ok", "failed" or "skipped", and its seconds.

    A check in progress has the result "running"; if nothing follows, the process died in it. A
    check that this machine cannot run has the number of cases and in `needs` what they need.
    """

    subject: str
    question: str
    verdict: str
    detail: str = ""
    seconds: float = 0.0
    num_cases_not_run: int = 0
    needs: str = ""


def run_checks(distribution: str, against: str | None = None) -> Iterator[CheckResult]:
    """Run all checks of a distribution; yield each when it starts and when it ends.

    With `against`, model families are also compared with that library, "transformers".
    """
    for subject, suite in suites(distribution, against):
        for name in [name for name in vars(_origin(suite)) if name.startswith("test_")]:
            question = name.removeprefix("test_").replace("_", " ")
            asked = CheckResult(subject, question, "running")
            yield asked
            start = time.monotonic()
            answer = _run_check(suite, name)
            yield replace(asked, **answer, seconds=round(time.monotonic() - start, 2))


def suites(distribution: str, against: str | None = None) -> Iterator[tuple[str, object]]:
    """Yield (subject, suite): the distribution first, then each kernel, family, parser and policy."""
    yield normalize(distribution), _suite(DistributionConformance, distribution=distribution)
    catalog = Catalog.discover(Selection(), check=False)
    for entry in catalog.all():
        if entry.distribution == normalize(distribution) and entry.status is Status.OK:
            yield from _suites_of(entry, catalog)
            if against is not None and entry.kind == "models":
                yield from _comparisons(entry, catalog)


def _comparisons(entry: Entry, catalog: Catalog) -> Iterator[tuple[str, object]]:
    """Yield the comparison of a family with transformers."""
    from tokenspeed_testing.against_transformers import TransformersConformance

    value = catalog.load(entry, object)
    if isinstance(value, ModelSpec):
        packages = _package(entry.value), _package(value.describe)
        config = _example(packages, value.architecture)
        subject = f"{entry.kind} {entry.name} against transformers"
        yield subject, _suite(TransformersConformance, spec=value, config=config)


def _suites_of(entry: Entry, catalog: Catalog) -> Iterator[tuple[str, object]]:
    value = catalog.load(entry, object)
    subject = f"{entry.kind} {entry.name}"
    if entry.kind.startswith(KERNELS_PREFIX):
        from tokenspeed_testing.comm import CommConformance
        from tokenspeed_testing.kernel import KernelConformance

        # The distribution's suite reports specs of unknown ops.
        ops = installed_ops(catalog)
        for spec in value if isinstance(value, tuple) else (value,):
            if isinstance(spec, KernelSpec) and spec.op in ops:
                kit = CommConformance if ops[spec.op].family == "comm" else KernelConformance
                yield f"{subject}: {spec.op}", _suite(kit, spec=spec)
    elif entry.kind == "policies" and callable(value):
        from tokenspeed_testing.policy import PolicyConformance

        yield subject, _suite(PolicyConformance, make=staticmethod(value))
    elif entry.kind == "grammars" and isinstance(value, GrammarSpec):
        from tokenspeed_testing.grammar import GrammarConformance

        yield subject, _suite(GrammarConformance, spec=value)
    elif entry.kind == "logits_processors" and isinstance(value, LogitsProcessorSpec):
        from tokenspeed_testing.logits_processor import LogitsProcessorConformance

        yield subject, _suite(LogitsProcessorConformance, spec=value)
    elif entry.kind in ("tool_parsers", "reasoning_parsers") and isinstance(value, ParserSpec):
        from tokenspeed_testing.parser import ParserConformance

        yield subject, _suite(ParserConformance, spec=value, kind=entry.kind)
    elif entry.kind == "models" and isinstance(value, ModelSpec):
        from tokenspeed_testing.model import ModelConformance

        package = _package(entry.value)
        config = _example((package, _package(value.describe)), value.architecture)
        if config is None:
            num_questions = sum(name.startswith("test_") for name in vars(ModelConformance))
            what = f"a small configuration for {value.architecture}"
            yield (
                subject,
                _suite(
                    _NoExample,
                    reason=NotRun(num_questions, f"{package}/{EXAMPLE.as_posix()}, {what}"),
                ),
            )
        else:
            yield subject, _suite(ModelConformance, spec=value, config=config)


class _NoExample:
    """Placeholder for a family that ships no example configuration."""

    reason: ClassVar[NotRun]

    def test_example_is_built(self) -> None:
        """Skipped: without an example configuration no check of the family can run."""
        raise self.reason


def _package(target: str) -> str:
    return target.partition(":")[0].partition(".")[0]


def _example(packages: Iterable[str], architecture: str) -> dict[str, Any] | None:
    """Return the example configuration that a package ships for an architecture, or None.

    A package with several families has a folder per family in `example/`.
    """
    from importlib.util import find_spec

    found = (find_spec(package) for package in packages)
    folders = [
        Path(folder)
        for each in found
        if each is not None
        for folder in each.submodule_search_locations or ()
    ]
    for folder in folders:
        for path in (folder / EXAMPLE, *sorted(folder.glob(f"{EXAMPLE.parent}/*/{EXAMPLE.name}"))):
            config: dict[str, Any] = (
                json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            )
            if architecture in config.get("architectures", ()):
                return config
    return None


def _suite(of: type[Any], **attributes: Any) -> object:
    return type(of.__name__, (of,), attributes)()


def _origin(suite: object) -> type[Any]:
    return type(suite).__mro__[1]


def _run_check(suite: object, name: str) -> dict[str, Any]:
    """Run one check and return its result."""
    try:
        getattr(suite, name)()
    except NotRun as reason:
        left = {"num_cases_not_run": reason.num_cases, "needs": reason.needs}
        return {"verdict": "skipped", "detail": str(reason), **left}
    except SkipTest as reason:
        return {"verdict": "skipped", "detail": str(reason)}
    except AssertionError as error:
        return {"verdict": "failed", "detail": str(error) or traceback.format_exc().strip()}
    except (
        Exception,
        SystemExit,
    ):  # plugin code may raise anything
        return {"verdict": "failed", "detail": traceback.format_exc().strip()}
    return {"verdict": "ok"}
