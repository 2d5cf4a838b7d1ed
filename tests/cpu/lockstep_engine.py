"""An engine that shares experts, in processes of a pool: it serves a schedule of requests and drains."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from host_graphs import capture_decodes
from process_pool import RankBuild

from tokenspeed_core.api.executors import Settings, WorkerExit
from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.api.step import StepSize
from tokenspeed_core.config.schema import read_keywords
from tokenspeed_core.engine.factory import discover, resolve, start
from tokenspeed_core.engine.inputs import InputProcessor, ModelText
from tokenspeed_core.engine.messages import Abort, Drain, Outputs, to_api
from tokenspeed_core.engine.process import EngineLoop
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.executor import ranks
from tokenspeed_core.executor.lockstep import Peers
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.worker import distributed, local
from tokenspeed_core.worker import process as worker
from tokenspeed_core.worker.staged import BucketSize


@dataclass(frozen=True, slots=True)
class Served:
    """The result of an engine."""

    tokens: dict[int, list[int]]  # by request
    num_steps: int  # of its own
    num_joined: int  # of others, without requests
    num_moves: int  # of experts, with --enable-eplb
    captured: list[BucketSize]  # the size of each captured step that ran, in order
    num_tokens: list[list[int]]  # of each engine in each captured step, without padding
    num_routed: list[list[int]]  # the same, as seen by experts, which skip padding


class PoolExecutor:
    """Gives the settings of the other ranks to processes of the pool, which wait for a file."""

    host: str | None = None

    def __init__(self, file: Path) -> None:
        self._file = file

    def start(self, settings: Settings, on_exit: Callable[[WorkerExit], None]) -> None:
        written = self._file.with_suffix(".part")
        written.write_text(json.dumps(settings))
        written.rename(self._file)

    def close(self, seconds: float) -> None:
        """Do nothing: the processes of the pool go on."""


def follow(file: Path, rank: int) -> None:
    """Run a rank with the settings that the `PoolExecutor` of its engine writes to a file."""
    while not file.exists():
        time.sleep(0.01)
    settings = {**json.loads(file.read_text()), "rank": rank, "local_rank": rank}
    reading, writing = os.pipe()
    rank_zero = worker.RankZero(settings, reading)
    worker._run(settings, rank_zero)
    rank_zero.close()
    os.close(reading)
    os.close(writing)


class RoutedTokens:
    """Notes the tokens of all engines in captured steps, and how many of them experts do not skip."""

    def __init__(self, runner: Any, patch: pytest.MonkeyPatch) -> None:
        self.num_tokens: list[list[int]] = []
        self.num_routed: list[list[int]] = []
        self._token_counts, self._is_captured = runner._token_counts, False
        self._choose, self._forward = runner.choose_shared_step, runner._model.forward
        patch.setattr(runner, "choose_shared_step", self._note_step)
        patch.setattr(runner._model, "forward", self._note_forward)

    def _note_step(self, sizes: Sequence[StepSize]) -> bool:
        self._is_captured = self._choose(sizes)
        if self._is_captured:
            self.num_tokens.append(
                [each.num_decode_tokens + each.num_chunk_tokens for each in sizes]
            )
        return self._is_captured

    def _note_forward(self, token_ids: torch.Tensor, *inputs: Any) -> torch.Tensor:
        if self._is_captured:
            num_engines, padding = len(self.num_tokens[-1]), self._token_counts.padding
            if padding is None:
                padding = torch.zeros(num_engines * len(token_ids), dtype=torch.bool)
            self.num_routed.append((~padding).view(num_engines, -1).sum(1).tolist())
        hidden: torch.Tensor = self._forward(token_ids, *inputs)
        return hidden


def serve(
    build: RankBuild,
    settings: Mapping[str, Any],
    connections: Sequence[Sequence[socket.socket | None]],
    prompts: Sequence[Sequence[Sequence[int]]],
    max_tokens: int,
    abort_after: int | None,
    more: Mapping[str, Any],
    delays: Sequence[int],
    captures: Sequence[int],
    folder: str,
) -> Served | None:
    """Serve one engine's prompts, each a list of token ids. Its first request is aborted after so many steps.

    `more` are settings that need several engines. An engine gets its prompts after `delays[engine]` steps. With
    `captures`, steps of these numbers of decodes, with and without prompts, are captured, and two steps are in flight.
    Rank 0 of an engine returns the result. The other ranks follow it; they meet in the folder.
    """
    rank, num_engines = build.group("data").rank, build.group("data").size
    place = build.group("engine").rank
    for other, row in enumerate(connections):
        for each in row if other != rank or place else ():
            if each is not None:
                each.close()
    distributed.init = lambda layout, address, device: build._handles
    distributed.close = lambda: None
    patch = pytest.MonkeyPatch()
    captured: list[BucketSize] = []
    make = local.build

    def build_and_capture(*arguments: Any, **keywords: Any) -> Any:
        nonlocal captured
        runner = make(*arguments, **keywords)
        captured = capture_decodes(runner, captures, patch, with_prompts=True)
        return runner

    if captures:
        patch.setattr(local, "build", build_and_capture)
    file = Path(folder) / f"engine-{rank}"
    if place:
        follow(file, place)
        patch.undo()
        return None
    peers = Peers([-1 if each is None else each.detach() for each in connections[rank]])
    patch.setattr(ranks, "_make_executor", lambda resolved, job, catalog: PoolExecutor(file))
    sharing = {"data_parallel_size": num_engines, "enable_expert_parallel": True, **more}
    config = read_keywords(None, settings).resolved(**sharing)
    catalog = discover(config)
    resolved = resolve(config, catalog, num_threads=1, replica=rank)
    started = start(
        resolved, catalog, Hooks.load(catalog), lambda stage, done, total: None, peers=peers
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    theirs.bind("inproc://engine")
    ours.connect("inproc://engine")
    inputs = InputProcessor(ModelText(None, None), started.ready)
    lockstep = started.lockstep
    assert lockstep is not None
    num_before = lockstep.num_steps
    runner: Any = lockstep._runner if started.ranks is None else lockstep._runner._runner
    routed = RoutedTokens(runner, patch)
    if captures:
        captured.clear()  # without the warm-up
        started.engine._depth = 2
        if started.engine.scheduler.drafts is not None:
            depth: Any = started.engine.scheduler.drafts._depth
            depth.account.pause = 0  # the outputs are short
            depth.account.balance = 1000.0  # slow steps of a busy machine start no pause
    delay = delays[rank] if delays else 0

    def submit() -> None:
        for number, prompt in enumerate(prompts[rank]):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            ours.send(pack(inputs.request(number, params, np.asarray(prompt, np.int32))))
        ours.send(pack(Drain()))

    def publish() -> None:
        nonlocal delay
        if delay and lockstep.num_steps - num_before >= delay:
            delay = 0
            submit()
        if started.engine.num_steps == abort_after:
            ours.send(pack(Abort(np.asarray([0], np.int64))))

    if not delay:
        submit()

    reading, writing = os.pipe()
    loop = EngineLoop(
        started.engine,
        started.ready,
        [theirs],
        reading,
        publish,
        ranks=started.ranks,
        lockstep=lockstep,
    )
    loop.run()
    patch.undo()
    num_all = lockstep.num_steps - num_before
    assert not started.engine.has_work
    started.engine.close()
    tokens: dict[int, list[int]] = {number: [] for number in range(len(prompts[rank]))}
    with suppress(zmq.Again):
        while True:
            message = to_api.unpack(ours.recv(zmq.DONTWAIT))
            if isinstance(message, Outputs):
                start_at = 0
                for request, count in zip(message.sequence_ids, message.num_tokens, strict=True):
                    found = message.token_ids[start_at : start_at + count]
                    tokens[int(request)] += found.tolist()
                    start_at += int(count)
    context.destroy(linger=0)
    os.close(reading)
    os.close(writing)
    num_moves = 0 if runner._balancer is None else runner._balancer.num_moves
    num_joined = num_all - started.engine.num_steps
    return Served(
        tokens,
        started.engine.num_steps,
        num_joined,
        num_moves,
        captured,
        routed.num_tokens,
        routed.num_routed,
    )
