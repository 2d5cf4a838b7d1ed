"""Runs the logits processors of plugins on the rows of the sequences that name them."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch

from tokenspeed_core.api.logits_processors import (
    LogitsProcessor,
    LogitsProcessorContext,
    LogitsRows,
)
from tokenspeed_core.api.step import I32, I64, SlotInits
from tokenspeed_core.engine.logits_processors import LogitsProcessorTable
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.worker.slots import ragged
from tokenspeed_core.worker.transfer import HostDeviceTransfer

log = logging.getLogger("tokenspeed.worker")


def load_processors(
    table: LogitsProcessorTable, catalog: Catalog, context: LogitsProcessorContext
) -> dict[str, LogitsProcessor]:
    """Make all processors of a table. Raises PluginError if a factory fails."""
    made: dict[str, LogitsProcessor] = {}
    for name, spec in table.specs.items():
        entry = catalog.get("logits_processors", name)
        expected: type[LogitsProcessor] = LogitsProcessor  # type: ignore[type-abstract]
        made[name] = make(entry, spec.load, lambda spec=spec: spec.factory()(context), expected)
    return made


class LogitsProcessors:
    """Calls each processor once per step, with the rows that name it.

    If a processor raises, its rows get no finite logit, so that their sequences end with an error.
    """

    def __init__(self, processors: Mapping[str, LogitsProcessor]) -> None:
        self._processors = processors
        self._names: dict[
            int, tuple[str, ...]
        ] = {}  # the processors of a slot, in the request's order
        self._failed: set[int] = set()

    def begin(self, inits: SlotInits, which: I32) -> None:
        """Notify the processors of the new sequences `which` (indices into the columns)."""
        for index in which.tolist():
            slot = int(inits.slots[index])
            wanted = json.loads(inits.processors[index])
            self._names[slot] = tuple(wanted)
            self._failed.discard(slot)
            token_ids = inits.history_ids[ragged(inits.history_starts, index)]
            num_prompt = int(inits.history_num_prompt[index])
            for name, params in wanted.items():
                try:
                    self._processors[name].begin(slot, params, token_ids, num_prompt)
                except Exception:  # plugin code may raise anything
                    log.exception("logits processor %s failed in `begin`", name)
                    self._failed.add(slot)

    def apply(
        self,
        logits: torch.Tensor,
        rows: I64,
        slots: I32,
        last_tokens: torch.Tensor,
        transfer: HostDeviceTransfer,
    ) -> None:
        """Change `rows` of float32 logits [R, V] in place. `slots` and `last_tokens` int64 [R] are of all rows."""
        users: dict[str, list[int]] = defaultdict(list)
        for row in rows.tolist():
            for name in self._names[int(slots[row])]:
                users[name].append(row)
        for name, chosen in users.items():
            used = slots[chosen]
            (places,) = transfer.send((np.array(chosen, np.int64),))
            part = logits[places]
            before = LogitsRows(used.tolist(), last_tokens[places])
            try:
                self._processors[name].apply(part, before)
            except Exception:  # plugin code may raise anything
                log.exception("logits processor %s failed in `apply`", name)
                self._failed.update(used.tolist())
            logits[places] = part
        failed = [row for row in rows.tolist() if int(slots[row]) in self._failed]
        if failed:
            (places,) = transfer.send((np.array(failed, np.int64),))
            logits[places] = float("nan")
