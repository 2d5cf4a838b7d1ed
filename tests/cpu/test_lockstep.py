"""Engines that share experts compute the tokens of one process: idle, under uneven load, and after aborts."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lockstep_engine import Served, serve
from parallel_table import documented
from process_pool import ProcessPool, Sizes
from serving import wait_until
from tiny_families import EIGHT_EXPERTS, EXPERTS, save_reference

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import PlatformInfo
from tokenspeed_core.api.step import StepFailed, StepPlan, StepSize
from tokenspeed_core.config.schema import read_keywords
from tokenspeed_core.engine.factory import discover, resolve
from tokenspeed_core.engine.runners import build_runner
from tokenspeed_core.errors import CapacityError, ConfigError, SelectionError
from tokenspeed_core.executor import lockstep
from tokenspeed_core.executor.lockstep import LockstepRunner, Peers, connect_peers, empty_plan
from tokenspeed_core.kernels.plan import KernelPlan
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.worker import distributed
from tokenspeed_core.worker.assemble import plan_for

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",  # in fewer bits, sums in another order may choose another token
    "kv_cache_memory": "4MB",
    "max_num_seqs": 4,
    "chunked_prefill_size": 16,
    "skip_tokenizer_init": True,
    "max_model_len": 96,
}
NUM_TOKENS = 12
FUSED = {"enable_allreduce_fusion": True, "comm_fusion_max_num_tokens": 8}
TENSOR_PARALLEL = pytest.param(2, marks=pytest.mark.release)  # processes of each engine
LAYOUTS = {"dp2+ep2": 1, "dp2xtp2+ep4": 2}  # with the processes of each engine
TABLE = [(family, layout) for family in EXPERTS for layout in LAYOUTS]
BY_DEFAULT = (("GptOss", "dp2+ep2"), ("Glm4Moe", "dp2+ep2"))
Prompts = Sequence[Sequence[int]]


def prompt(length: int, seed: int) -> list[int]:
    return [(seed + 7 * index) % 90 + 1 for index in range(length)]


UNEVEN: Sequence[Prompts] = (
    [prompt(40, 1), prompt(3, 2), prompt(21, 3), prompt(16, 4), prompt(5, 5), prompt(2, 6)],
    [prompt(9, 7)],
)


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("qwen3-moe")
    save_reference("Qwen3Moe", folder, num_experts=8)
    return str(folder)


def together(
    pool: ProcessPool,
    model: str,
    prompts: Sequence[Prompts],
    abort_after: int | None = None,
    delays: Sequence[int] = (),
    captures: Sequence[int] = (),
    num_tokens: int = NUM_TOKENS,
    tp: int = 1,
    **sharing: Any,
) -> Sequence[Served]:
    """Serve the prompts with one engine for each list of them. An engine has `tp` processes."""
    num_engines, moe = len(prompts), sharing.get("moe_tp_size", 1)
    connections = [
        [None if fd < 0 else socket.socket(fileno=fd) for fd in row]
        for row in connect_peers(num_engines)
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = pool.run(
            serve,
            Sizes(attn=tp, dense=tp, moe=moe, experts=num_engines * tp // moe, data=num_engines),
            {**SETTINGS, "model": model},
            connections,
            prompts,
            num_tokens,
            abort_after,
            {"tensor_parallel_size": tp, **sharing},
            delays,
            captures,
            folder,
        )
    for row in connections:
        for each in row:
            if each is not None:
                each.close()
    return [each for each in found if each is not None]  # of rank 0 of each engine


def alone(
    model: str, prompts: Sequence[Prompts], num_tokens: int = NUM_TOKENS
) -> list[list[list[int]]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(model, **SETTINGS) as llm:
        return [
            [
                list(output.outputs[0].token_ids)
                for output in llm.generate([{"prompt_token_ids": each} for each in part], params)
            ]
            for part in prompts
        ]


def tokens(served: Served) -> list[list[int]]:
    return [served.tokens[number] for number in range(len(served.tokens))]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, TENSOR_PARALLEL])
def test_uneven_engines_generate_the_tokens_of_one_process(
    pool: ProcessPool, qwen3_moe: str, tp: int
) -> None:
    first, second = together(pool, qwen3_moe, UNEVEN, tp=tp)
    assert [tokens(first), tokens(second)] == alone(qwen3_moe, UNEVEN)
    assert first.num_joined < first.num_steps
    assert second.num_joined > 0  # it had less to do
    assert first.num_steps + first.num_joined == second.num_steps + second.num_joined


@pytest.mark.parametrize("tp", [1, TENSOR_PARALLEL])
def test_an_idle_engine_joins_the_steps_of_another(
    pool: ProcessPool, qwen3_moe: str, tp: int
) -> None:
    prompts: Sequence[Prompts] = ([], UNEVEN[0][:2])
    idle, busy = together(pool, qwen3_moe, prompts, tp=tp)
    assert tokens(busy) == alone(qwen3_moe, prompts)[1]
    assert (idle.num_steps, idle.num_joined) == (0, busy.num_steps)
    assert busy.num_joined == 0


def test_four_engines_generate_the_tokens_of_one_process(pool: ProcessPool, qwen3_moe: str) -> None:
    prompts: Sequence[Prompts] = ([], UNEVEN[0][:2], [], UNEVEN[1])
    served = together(pool, qwen3_moe, prompts)
    assert [tokens(each) for each in served] == alone(qwen3_moe, prompts)
    assert len({each.num_steps + each.num_joined for each in served}) == 1


@pytest.mark.parametrize("num_engines", [2, 4])
def test_routed_tokens_generate_the_tokens_of_one_process(
    pool: ProcessPool, qwen3_moe: str, num_engines: int
) -> None:
    prompts: Sequence[Prompts] = ([], UNEVEN[0][:2], [], UNEVEN[1])[-num_engines:]
    served = together(pool, qwen3_moe, prompts, all2all_backend=("alltoall",))
    assert [tokens(each) for each in served] == alone(qwen3_moe, prompts)


@pytest.mark.release
@pytest.mark.parametrize(("moe", "backend"), [(1, "alltoall"), (2, "alltoall"), (2, "torch")])
def test_engines_of_several_processes_may_route_tokens_and_divide_experts(
    pool: ProcessPool, qwen3_moe: str, moe: int, backend: str
) -> None:
    settings = {"moe_tp_size": moe, "all2all_backend": (backend,)}
    served = together(pool, qwen3_moe, UNEVEN, tp=2, **settings)
    assert [tokens(each) for each in served] == alone(qwen3_moe, UNEVEN)


@pytest.mark.parametrize("tp", [1, TENSOR_PARALLEL])
def test_an_abort_leaves_the_tokens_of_other_requests(
    pool: ProcessPool, qwen3_moe: str, tp: int
) -> None:
    prompts: Sequence[Prompts] = (UNEVEN[0][1:3], UNEVEN[1])
    first, second = together(pool, qwen3_moe, prompts, abort_after=4, tp=tp)
    expected = alone(qwen3_moe, prompts)
    for served, whole in zip((first, second), expected, strict=True):
        aborted, *others = tokens(served)
        assert 0 < len(aborted) < NUM_TOKENS
        assert aborted == whole[0][: len(aborted)]
        assert others == whole[1:]


@pytest.mark.parametrize(
    ("tp", "settings"),
    [
        (1, {}),
        (1, {"all2all_backend": ("alltoall",)}),
        pytest.param(2, {}, marks=pytest.mark.release),
        # Prompts have more tokens than the limit, decode steps fewer.
        pytest.param(2, FUSED, marks=pytest.mark.release),
    ],
)
def test_latent_attention_and_shared_experts_generate_the_tokens_of_one_process(
    pool: ProcessPool, tp: int, settings: dict[str, Any]
) -> None:
    prompts: Sequence[Prompts] = ([prompt(20, 1), prompt(3, 2)], [prompt(7, 3)])
    served = together(pool, "demo-deepseek", prompts, tp=tp, **settings)
    assert [tokens(each) for each in served] == alone("demo-deepseek", prompts)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.release)
        for case in TABLE
    ],
)
def test_families_with_experts_generate_the_tokens_of_one_process(
    pool: ProcessPool, family: str, layout: str, tmp_path: Path
) -> None:
    save_reference(family, tmp_path, **EIGHT_EXPERTS.get(family, {}))
    model, prompts = str(tmp_path), [UNEVEN[0][:3], UNEVEN[1]]
    served = together(pool, model, prompts, tp=LAYOUTS[layout])
    assert [tokens(each) for each in served] == alone(model, prompts)


def test_documentation_lists_the_tested_engines() -> None:
    assert [case for case in documented("tokens") if case[1] in LAYOUTS] == TABLE


def test_peers_exchange_sizes_and_notice_an_end() -> None:
    first, second = (Peers(fds) for fds in connect_peers(2))
    assert not first.is_waiting()
    sizes = [StepSize(5, 2), StepSize(0, 0, 2, 30, is_eager=True, no_shared_prefix=False)]
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(second.exchange, sizes[1])
        while not first.is_waiting():
            time.sleep(0.001)
        assert first.exchange(sizes[0]) == other.result() == sizes
    assert not first.is_waiting()
    first.finish()
    assert not second.is_waiting()
    assert not second.have_finished
    second.close()
    with pytest.raises(StepFailed, match="engine 1 of 2"):
        first.exchange(StepSize())
    first.close()


@pytest.mark.parametrize("reads_first", [True, False])
def test_all_engines_name_the_rank_that_failed_first(
    reads_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "FINISH_SECONDS", 0.01)
    lost: list[str] = []
    first, second, third = (Peers(fds) for fds in connect_peers(3))
    first.fail("rank 1 of 2 was killed\nits log")
    assert first.failure == "rank 1 of 2 was killed\nits log"
    second.watch(lost.append)
    for peers in (second, third):
        with pytest.raises(StepFailed, match=r"engine 0 of 3.* rank 1 of 2 was killed$"):
            peers.is_waiting() if reads_first else peers.exchange(StepSize())
    wait_until(lambda: bool(lost), 10, "the failure")
    third.fail("rank 0 of 2 failed as well")
    for peers in (first, second, third):
        assert "rank 1 of 2 was killed" in str(peers.failure)
        peers.close()
    assert lost == [second.failure]


def test_blocked_engine_reports_the_first_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "FINISH_SECONDS", 0.01)
    lost: list[str] = []
    first, second, third = (Peers(fds) for fds in connect_peers(3))
    second.watch(lost.append)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(second.exchange, StepSize())  # for the first engine
        wait_until(third.is_waiting, 10, "the exchange")
        third._send(1, lockstep._pack(StepSize()))
        third.fail("rank 1 of 2 was killed")
        wait_until(lambda: bool(lost), 10, "the failure")
        assert not waiting.done()
        first.close()
        with pytest.raises(StepFailed, match=r"engine 2 of 3.* rank 1 of 2 was killed$"):
            waiting.result()
    assert lost == [second.failure]
    for peers in (second, third):
        peers.close()


def test_watched_start_keeps_the_shared_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """`watch` reads the text of the first engine before the second one asks for it."""
    monkeypatch.setattr(lockstep, "FINISH_SECONDS", 0.01)
    lost: list[str] = []
    first, second, third = (Peers(fds) for fds in connect_peers(3))
    second.watch(lost.append)
    first.share(lambda: "/tmp/rendezvous")
    third.fail("no memory")
    wait_until(lambda: bool(lost), 10, "the failure")
    assert second.share(str) == "/tmp/rendezvous"
    with pytest.raises(StepFailed, match=r"engine 2 of 3.* no memory$"):
        second.exchange(StepSize())
    for peers in (first, second, third):
        peers.close()


def test_exchange_notices_a_message_that_watch_has_read() -> None:
    class Watched:
        """A poller during which `watch` reads the message."""

        def poll(self, milliseconds: int) -> list[tuple[int, int]]:
            first._send(1, lockstep._pack(StepSize(5)))
            second._read_all()
            return []

    first, second = (Peers(fds) for fds in connect_peers(2))
    second._readable[0] = Watched()  # type: ignore[assignment]
    assert second.exchange(StepSize(3)) == [StepSize(5), StepSize(3)]
    for peers in (first, second):
        peers.close()


def test_end_after_all_have_finished_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "FINISH_SECONDS", 0.01)
    lost: list[str] = []
    first, second = (Peers(fds) for fds in connect_peers(2))
    second.watch(lost.append)
    second.finish()
    first.finish()
    first.close()
    time.sleep(0.1)
    assert second.have_finished
    assert lost == []
    second.close()


def test_engine_that_loses_another_one_is_not_the_first_cause() -> None:
    first, second, third = (Peers(fds) for fds in connect_peers(3))
    third.fail("rank 1 of 2 was killed")
    second.close()
    with pytest.raises(StepFailed, match=r"engine 2 of 3.* rank 1 of 2 was killed$"):
        first.exchange(StepSize())  # waits for the second engine
    for peers in (first, third):
        peers.close()


def test_reason_arrives_from_an_engine_that_read_nothing() -> None:
    first, second = (Peers(fds) for fds in connect_peers(2))
    second._send(0, b"unread")
    first.fail("no memory")
    first.close()
    with pytest.raises(StepFailed, match=r"engine 0 of 2.* no memory$"):
        second.is_waiting()
    second.close()


def test_engines_name_the_step_that_failed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "ATTRIBUTION_SECONDS", 0.01)

    class Failing:
        def step_size(self, plan: StepPlan) -> StepSize:
            return StepSize(1)

        def choose_shared_step(self, sizes: Sequence[StepSize]) -> bool:
            raise StepFailed("no memory")

    first, second = (Peers(fds) for fds in connect_peers(2))
    runner: Any = Failing()
    failing = LockstepRunner(runner, first, unused_slot=0, num_groups=1, leave=None)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(second.exchange, StepSize())
        with pytest.raises(StepFailed, match=r"^no memory$"):
            failing.forward(empty_plan(0, [0], 1))
        other.result()
    with pytest.raises(StepFailed, match=r"engine 0 of 2.* no memory"):
        second.is_waiting()
    for each in (first, second):
        each.close()


def test_graphs_capture_all_collectives_except_the_exchange() -> None:
    def plan(backend: str) -> KernelPlan:
        config = read_keywords("demo-deepseek", {"device": "cpu"}).resolved(
            data_parallel_size=2, enable_expert_parallel=True, all2all_backend=(backend,)
        )
        catalog = discover(config)
        return plan_for(resolve(config, catalog), catalog, PlatformInfo("cuda", (9, 0)))

    for op in ("all_gather_tokens", "reduce_scatter_tokens"):
        assert {each.backend for each in plan("auto").find(op)} == {"nccl"}
    with pytest.raises(SelectionError, match=r"(?s)exchange_tokens.*graph_safe.*--enforce-eager"):
        plan("alltoall")


def test_draft_models_are_refused() -> None:
    config = read_keywords("demo-deepseek", {"speculative_algorithm": "mtp", "device": "cpu"})
    config = config.resolved(data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"mtp.*draft model"):
        resolve(config, discover(config))


def test_failed_start_leaves_no_folder(
    tiny: Callable[..., Resolved],
    catalog: Catalog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(distributed, "init", Mock(side_effect=CapacityError("no memory")))
    first, second = (Peers(fds) for fds in connect_peers(2))
    with pytest.raises(CapacityError, match="no memory"):
        build_runner(tiny(), catalog, lambda *step: None, None, first)
    assert list(tmp_path.iterdir()) == []
    for each in (first, second):
        each.close()
