"""The metrics of an API worker, and its view of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed_core.commands.serving import Heartbeat
from tokenspeed_server.metrics import MetricsMemory, WorkerMetrics
from tokenspeed_server.prometheus import Metrics
from tokenspeed_server.statistics import EngineMonitors


@dataclass(slots=True)
class Observability:
    """The numbers of one API worker. Without `--enable-metrics`, only the engine's."""

    monitor: EngineMonitors = field(default_factory=EngineMonitors)
    worker: WorkerMetrics | None = None
    prometheus: Metrics | None = None

    @classmethod
    def with_metrics(
        cls,
        memory: MetricsMemory,
        worker: int,
        model_name: str,
        *,
        has_prometheus: bool,
        num_engines: int = 1,
    ) -> Observability:
        """Count requests in a row of the shared memory."""
        monitor = EngineMonitors(num_engines)
        page = Metrics(memory, monitor, model_name) if has_prometheus else None
        return cls(monitor, WorkerMetrics(memory.row(worker)), page)

    def note_heartbeat(self, replica: int, heartbeat: Heartbeat) -> None:
        """Take an engine's numbers, and show this worker's to the other workers."""
        self.monitor.add(replica, heartbeat)
        if self.worker is not None:
            self.worker.flush()
