"""Each API worker receives the columns of its own sequences."""

from __future__ import annotations

import numpy as np

from tokenspeed_core.api.step import StepLogprobs
from tokenspeed_core.engine.messages import WORKER_SHIFT, Outputs, PromptLogprobs, to_api
from tokenspeed_core.engine.transport import split
from tokenspeed_core.engine.wire import pack


def test_split_gives_each_worker_its_rows_and_logprobs() -> None:
    ids = np.array(
        [1, (1 << WORKER_SHIFT) + 1, 2, (2 << WORKER_SHIFT) + 7, (1 << WORKER_SHIFT) + 2], np.int64
    )
    counts = np.array([1, 2, 0, 1, 3], np.int32)
    outputs = Outputs(
        ids,
        counts,
        np.arange(7, dtype=np.int32),
        np.array([0, 0, 3, 2, 1], np.int32),
        np.arange(5, dtype=np.int32),
        StepLogprobs(
            np.array([1, 3, 4], np.int32),
            2,
            np.arange(6, dtype=np.float32),
            np.arange(6, dtype=np.int32),
            np.arange(12, dtype=np.int32),
            np.arange(12, dtype=np.float32),
        ),
    )
    parts = dict(split(outputs))
    assert {worker: part.sequence_ids.tolist() for worker, part in parts.items()} == {
        0: [1, 2],
        1: [(1 << WORKER_SHIFT) + 1, (1 << WORKER_SHIFT) + 2],
        2: [(2 << WORKER_SHIFT) + 7],
    }
    assert {worker: part.token_ids.tolist() for worker, part in parts.items()} == {
        0: [0],
        1: [1, 2, 4, 5, 6],
        2: [3],
    }
    assert [parts[worker].finish.tolist() for worker in range(3)] == [[0, 3], [0, 1], [2]]
    reported = [part.logprobs for _, part in sorted(parts.items()) if part.logprobs is not None]
    assert [each.rows.tolist() for each in reported] == [[], [0, 1], [0]]
    assert [each.chosen.tolist() for each in reported] == [[], [0, 1, 3, 4, 5], [2]]
    assert reported[1].top_ids.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]
    columns = [*(each.rows for each in reported), *(part.token_ids for part in parts.values())]
    assert {column.dtype for column in columns} == {np.dtype(np.int32)}


def test_split_gives_each_worker_the_prompts_of_its_sequences() -> None:
    values, ids = np.ones(2, np.float32), np.array([3, 4], np.int32)
    prompts = tuple(
        PromptLogprobs(sequence_id, 1, values, ids, ids, values)
        for sequence_id in (7, (1 << WORKER_SHIFT) + 7)
    )
    none = np.zeros(0, np.int32)
    outputs = Outputs(none.astype(np.int64), none, none, none, none, prompts=prompts)
    parts = {worker: to_api.unpack(pack(part)).prompts for worker, part in split(outputs)}
    assert {worker: [each.sequence_id for each in part] for worker, part in parts.items()} == {
        0: [7],
        1: [(1 << WORKER_SHIFT) + 7],
    }
    assert parts[0][0].top_ids.tolist() == [3, 4]
