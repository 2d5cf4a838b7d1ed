"""Which conformance suites an installed distribution gets, and what each of their questions answered."""

from __future__ import annotations

import json
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import SkipTest

from tokenspeed_core.kernels.spec import KernelSpec
from tokenspeed_core.models import ModelSpec
from tokenspeed_core.parsers import ParserSpec
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry, Status
from tokenspeed_core.plugins.kinds import KERNELS_PREFIX
from tokenspeed_core.plugins.selection import Selection, normalise
from tokenspeed_core.testing.cells import NotRun
from tokenspeed_core.testing.distribution import DistributionConformance

EXAMPLE = Path("example", "config.json")  # in a family's package: a small configuration, which the suite builds


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one question of a suite answered: "ok", "failed" or "skipped", and in how many seconds.

    A question under way has the verdict "running": where nothing follows it, the process died in it. One skipped since
    this machine lacks something has the number of cells that were therefore not run, and in `needs` what they need.
    """

    subject: str
    question: str
    verdict: str
    detail: str = ""
    seconds: float = 0.0
    num_cells_not_run: int = 0
    needs: str = ""


def verdicts(distribution: str) -> Iterator[Verdict]:
    """Ask everything of a distribution, each question announced before it is asked."""
    for subject, suite in suites(distribution):
        for name in [name for name in vars(_origin(suite)) if name.startswith("test_")]:
            question = name.removeprefix("test_").replace("_", " ")
            asked = Verdict(subject, question, "running")
            yield asked
            start = time.monotonic()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                answer = _ask(suite, name)
            told = (text for each in caught if " is deprecated since tokenspeed-core " in (text := str(each.message)))
            answer["detail"] = "\n".join(filter(None, [answer.get("detail"), *dict.fromkeys(told)]))
            yield replace(asked, **answer, seconds=round(time.monotonic() - start, 2))


def suites(distribution: str) -> Iterator[tuple[str, object]]:
    """Yield (what is asked, its suite): the distribution itself first, then each kernel, family, parser and policy."""
    yield normalise(distribution), _suite(DistributionConformance, distribution=distribution)
    catalog = Catalog.discover(Selection(), check=False)
    for entry in catalog.all():
        if entry.distribution == normalise(distribution) and entry.status is Status.OK:
            yield from _suites_of(entry, catalog)


def _suites_of(entry: Entry, catalog: Catalog) -> Iterator[tuple[str, object]]:
    value = catalog.load(entry, object)
    subject = f"{entry.kind} {entry.name}"
    if entry.kind.startswith(KERNELS_PREFIX):
        from tokenspeed_core.testing.kernel import KernelConformance

        for spec in value if isinstance(value, tuple) else (value,):
            if isinstance(spec, KernelSpec):
                yield f"{subject}: {spec.op}", _suite(KernelConformance, spec=spec)
    elif entry.kind == "policies" and callable(value):
        from tokenspeed_core.testing.policy import PolicyConformance

        yield subject, _suite(PolicyConformance, make=staticmethod(value))
    elif entry.kind in ("tool_parsers", "reasoning_parsers") and isinstance(value, ParserSpec):
        from tokenspeed_core.testing.parser import ParserConformance

        yield subject, _suite(ParserConformance, spec=value, kind=entry.kind)
    elif entry.kind == "models" and isinstance(value, ModelSpec):
        config = _example(value)
        if config is not None:
            from tokenspeed_core.testing.model import ModelConformance

            yield subject, _suite(ModelConformance, spec=value, config=config)


def _example(spec: ModelSpec) -> dict[str, Any] | None:
    """Return the small configuration that a family's package brings, None where it brings none of this family."""
    import importlib.util

    found = importlib.util.find_spec(spec.describe.partition(":")[0].partition(".")[0])
    if found is None or found.origin is None or not (path := Path(found.origin).parent / EXAMPLE).is_file():
        return None
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config if spec.architecture in config.get("architectures", ()) else None


def _suite(of: type[Any], **attributes: Any) -> object:
    return type(of.__name__, (of,), attributes)()


def _origin(suite: object) -> type[Any]:
    return type(suite).__mro__[1]


def _ask(suite: object, name: str) -> dict[str, Any]:
    """Return what a verdict says besides the question."""
    try:
        getattr(suite, name)()
    except NotRun as reason:
        left = {"num_cells_not_run": reason.num_cells, "needs": reason.needs}
        return {"verdict": "skipped", "detail": str(reason), **left}
    except SkipTest as reason:
        return {"verdict": "skipped", "detail": str(reason)}
    except AssertionError as error:
        return {"verdict": "failed", "detail": str(error) or traceback.format_exc().strip()}
    except (Exception, SystemExit):  # plugin code may raise anything, and each question is asked apart
        return {"verdict": "failed", "detail": traceback.format_exc().strip()}
    return {"verdict": "ok"}
