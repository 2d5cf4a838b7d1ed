"""Log lines about engines that stall, such as those with a process that hangs."""

from __future__ import annotations

import asyncio
import logging

from tokenspeed_core.commands.serving import State
from tokenspeed_server.replicas.engines import EngineReplicas

CHECK_SECONDS = 1.0
log = logging.getLogger(__name__)


class StallLog:
    """Logs a line when an engine stalls, and one when it continues."""

    def __init__(self, engines: EngineReplicas) -> None:
        self._engines = engines
        self._stalled: set[int] = set()

    async def run(self) -> None:
        """Check the engines until the task is canceled."""
        while True:
            self.check()
            await asyncio.sleep(CHECK_SECONDS)

    def check(self) -> None:
        """Log what changed since the last check."""
        for number, client in enumerate(self._engines.clients):
            is_ready, name = client.state is State.READY, self._engines.name_of(number)
            reason = client.why_unhealthy() if is_ready else None
            if reason is not None and number not in self._stalled:
                self._stalled.add(number)
                log.error("%s stalled: %s", name, reason)
            elif reason is None and number in self._stalled:
                self._stalled.remove(number)
                if is_ready:
                    log.info("%s continues", name)
