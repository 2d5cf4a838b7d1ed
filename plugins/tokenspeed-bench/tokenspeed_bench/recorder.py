"""Records engine steps with PyTorch's profiler, in the engine's process, on request.

Requests and answers are files in a folder that both processes know.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity

    from tokenspeed_core.api import StepRecord

VARIABLE = "TOKENSPEED_BENCH_RECORDER"  # environment variable with the folder
STEPS = "tokenspeed_steps"  # a trace's key of its steps by the names that torch gave them
WARM_UP = 4  # steps that torch's profiler discards, because its start makes them slow


@dataclass(frozen=True, slots=True)
class Order:
    """A request to skip `wait` steps (at least 1), record `steps` steps, and export the trace as `name`."""

    name: str
    wait: int
    steps: int

    def put(self, folder: Path) -> None:
        """Write the order for the recorder of a folder. Raises OSError."""
        part = folder / "order.part"
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(_order(folder))

    def is_taken(self, folder: Path) -> bool:
        """Return whether the recorder has read it."""
        return not _order(folder).exists()

    def trace(self, folder: Path) -> Path:
        """Return the path of the finished trace."""
        return folder / self.name

    def failure(self, folder: Path) -> Path:
        """Return the path of the error message if there is no trace."""
        return folder / f"{self.name}.failure"

    def is_answered(self, folder: Path) -> bool:
        """Return whether the trace or the error exists."""
        return self.trace(folder).exists() or self.failure(folder).exists()


class Recorder:
    """Polls for orders at each step. A new order ends the current recording."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._order: Order | None = None  # that is carried out
        self._profiler: Any = None
        self._steps: dict[str, str] = {}

    def observer(self) -> Callable[[StepRecord], None]:
        """Return `observe` as a plain function, which can carry pluggy's marker."""

        def observe_step(record: StepRecord) -> None:
            self.observe(record)

        return observe_step

    def observe(self, record: StepRecord) -> None:
        """Handle a finished step. Errors are written to a file; the engine continues."""
        try:
            order = self._next_order()
            if order is not None:
                self._order = order
                self._give_up()
                self._begin(order)
            elif self._profiler is not None:
                self._pass(record)
        except Exception as error:  # torch may raise anything
            assert self._order is not None
            self._profiler = None
            self._order.failure(self._folder).write_text(
                f"{type(error).__name__}: {error}", encoding="utf-8"
            )

    def _next_order(self) -> Order | None:
        path = _order(self._folder)
        if not path.exists():
            return None
        order = Order(**json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
        return order

    def _begin(self, order: Order) -> None:
        from torch.profiler import profile, schedule

        warm_up = min(WARM_UP, order.wait)
        rhythm = schedule(wait=order.wait - warm_up, warmup=warm_up, active=order.steps, repeat=1)
        self._steps = {}
        self._profiler = profile(
            activities=activities(), schedule=rhythm, on_trace_ready=self._export
        )
        self._profiler.start()

    def _pass(self, record: StepRecord) -> None:
        profiler = self._profiler
        assert self._order is not None
        if (
            profiler.step_num >= self._order.wait
        ):  # it is recorded, under the name that torch gives it
            self._steps[f"ProfilerStep#{profiler.step_num}"] = (
                f"step {record.step_id}: rows {record.num_rows}, decodes {record.num_decodes}, "
                f"tokens {record.num_tokens}"
            )
        if (
            len(self._steps) == self._order.steps
        ):  # `step` ends the trace, and then nothing can be added
            profiler.add_metadata_json(STEPS, json.dumps(self._steps))
        profiler.step()
        if self._profiler is None:  # it was exported
            profiler.stop()

    def _export(self, profiler: Any) -> None:
        assert self._order is not None
        path = self._order.trace(self._folder)
        part = path.with_name(f"{path.name}.part")
        profiler.export_chrome_trace(str(part))
        if not part.exists():  # torch raises nothing
            raise OSError("torch wrote no trace; check the free disk space")
        os.replace(part, path)
        self._profiler = None

    def _give_up(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.on_trace_ready = None
            profiler.stop()


def _order(folder: Path) -> Path:
    return folder / "order.json"


def activities() -> list[ProfilerActivity]:
    """Return the profiler activities: the host, and the device if there is one."""
    from torch.cuda import is_available
    from torch.profiler import ProfilerActivity

    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_available() else [])]
