"""The worker on a CUDA device: graphs, overlapped steps, the CPU, synchronization and memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from tokenspeed_testing.plans import PlanMaker

from tokenspeed_core.api.step import LateInputs, OutOfMemory, StepPlan, StepResult
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.errors import CapacityError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.local import LocalRunner, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"bias": {11: 4.0}},
    {"logprobs": 3},
    {"temperature": 1.2, "seed": -1, "top_k": 30, "top_p": 0.8, "logprobs": 1},
]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LocalRunner]:
    catalog = Catalog.discover()
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    defaults: dict[str, Any] = {
        "model": str(folder),
        "device": "cuda",
        "load_format": "dummy",
        "max_num_seqs": 20,
        "chunked_prefill_size": 512,
        "max_total_tokens": 32768,
        "block_size": 16,
    }

    def made(**settings: Any) -> LocalRunner:
        resolved = resolve(Config.from_keywords(**{**defaults, **settings}), catalog)
        runner = build(resolved, catalog, lambda what, done, total: None)
        for slot in runner._model.weight_map():  # type: ignore[attr-defined]
            if slot.kind != "norm":
                slot.target.mul_(6.0)  # so that each token depends on all earlier ones
        return runner

    return made


@pytest.fixture(scope="module")
def shared_graphs(make: Callable[..., LocalRunner]) -> LocalRunner:
    return make()


@pytest.fixture(scope="module")
def shared_eager(make: Callable[..., LocalRunner]) -> LocalRunner:
    return make(enforce_eager=True)


@pytest.fixture
def graphs(shared_graphs: LocalRunner) -> Iterator[LocalRunner]:
    shared_graphs.forget()
    yield shared_graphs
    shared_graphs.forget()


@pytest.fixture
def eager(shared_eager: LocalRunner) -> Iterator[LocalRunner]:
    shared_eager.forget()
    yield shared_eager
    shared_eager.forget()


def start(maker: PlanMaker, num_rows: int, params: list[dict[str, Any]]) -> list[str]:
    names = [f"s{i}" for i in range(num_rows)]
    for slot, name in enumerate(names):
        prompt = [(7 * slot + 3 * i) % 990 for i in range(5 + 3 * slot)]
        maker.add(name, prompt, slot, **params[slot % len(params)])
    return names


def serve(
    runner: LocalRunner, num_rows: int, count: int, params: list[dict[str, Any]]
) -> list[list[int]]:
    maker = PlanMaker(runner.block_size)
    names = start(maker, num_rows, params)
    maker.step(runner, chunks={name: maker.sequences[name].num_prompt for name in names})
    for _ in range(count - 1):
        maker.step(runner, decodes=names)
    outputs = [maker.sequences[name].output for name in names]
    assert len(set(outputs[0])) > count // 3, "the model must not be constant"
    return outputs


@pytest.mark.parametrize("num_rows", [1, 2, 8, 16])
def test_graph_is_bitwise_equal_to_eager(
    graphs: LocalRunner, eager: LocalRunner, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers = [PlanMaker(graphs.block_size) for _ in range(2)]
    with monkeypatch.context() as patch:
        # Without graphs, prompts have equal shapes in both: GEMM rounding depends on the shape.
        patch.setattr(graphs, "_graphs", None)
        for maker, runner in zip(makers, (graphs, eager), strict=True):
            names = start(maker, num_rows, [{"logprobs": 5}])
            maker.step(runner, chunks={name: maker.sequences[name].num_prompt for name in names})
    assert graphs._graphs is not None
    graphs._graphs.invalidate()
    for _ in range(20):
        one, other = (
            maker.step(runner, decodes=names)
            for maker, runner in zip(makers, (graphs, eager), strict=True)
        )
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert np.array_equal(one.logprobs.chosen, other.logprobs.chosen)
        assert np.array_equal(one.logprobs.top_values, other.logprobs.top_values)


@pytest.mark.parametrize("params", [[{}], [{}, {"temperature": 0.9, "seed": 5}], PARAMS])
def test_masked_graph_is_equal_to_eager(
    graphs: LocalRunner, eager: LocalRunner, params: list[dict[str, Any]]
) -> None:
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (2, 32)).astype(np.int32)
    late = LateInputs(np.array([1, 3], np.int32), words.reshape(-1))
    outputs: list[list[list[int]]] = []
    for runner in (graphs, eager):
        maker = PlanMaker(runner.block_size)
        names = start(maker, 5, params)
        for step in range(8):
            chunks = {} if step else {name: maker.sequences[name].num_prompt for name in names}
            plan = maker.plan(names if step else [], chunks)
            runner.forward(plan)
            runner.sample(plan.step_id, late)
            maker.take(plan, runner.collect(plan.step_id))
        outputs.append([maker.sequences[name].output for name in names])
    assert outputs[0] == outputs[1]
    for row, word in ((1, words[0]), (3, words[1])):
        assert all(word[token // 32] >> token % 32 & 1 for token in outputs[0][row])


@pytest.mark.parametrize("is_pinned", [True, False])
def test_each_step_reads_its_own_mask(
    graphs: LocalRunner, eager: LocalRunner, is_pinned: bool
) -> None:
    draws = np.random.default_rng(2)
    for runner in (graphs, eager):
        buffer = runner.mask_buffer()
        maker = PlanMaker(runner.block_size)
        names = start(maker, 5, [{}])
        for step in range(24):
            chunks = {} if step else {name: maker.sequences[name].num_prompt for name in names}
            plan = maker.plan(names if step else [], chunks)
            words = buffer[:2] if is_pinned else np.zeros_like(buffer[:2])
            words[:] = 0
            allowed = draws.integers(0, SHAPE["vocab_size"], 2)
            words[np.arange(2), allowed // 32] = np.int64(1 << allowed % 32).astype(np.int32)
            runner.forward(plan)
            late = LateInputs(np.array([1, 3], np.int32), words.reshape(-1))
            runner.sample(plan.step_id, late)
            result = runner.collect(plan.step_id)
            assert np.array_equal(result.token_ids[[1, 3]], allowed)
            maker.take(plan, result)


@pytest.mark.parametrize("num_rows", [1, 3, 13, 20])
def test_padding_rows_change_no_token(
    graphs: LocalRunner, eager: LocalRunner, num_rows: int
) -> None:
    assert serve(graphs, num_rows, 24, PARAMS) == serve(eager, num_rows, 24, PARAMS)


def test_float32_tokens_equal_the_cpu(
    graphs: LocalRunner, make: Callable[..., LocalRunner]
) -> None:
    cpu = make(device="cpu")
    weights = {slot.name: slot.target for slot in cpu._model.weight_map()}  # type: ignore[attr-defined]
    for slot in graphs._model.weight_map():  # type: ignore[attr-defined]
        weights[slot.name].copy_(slot.target)
    assert serve(graphs, 6, 16, PARAMS) == serve(cpu, 6, 16, PARAMS)


def overlapped(
    runner: LocalRunner, num_rows: int, count: int, params: list[dict[str, Any]]
) -> list[list[int]]:
    """Serve with two steps in flight."""
    maker = PlanMaker(runner.block_size)
    names = start(maker, num_rows, params)
    in_flight: list[StepPlan] = []
    for index in range(count):
        chunks = {name: maker.sequences[name].num_prompt for name in names} if index == 0 else {}
        plan = maker.plan(() if chunks else names, chunks)
        runner.forward(plan)
        runner.sample(plan.step_id, None)
        in_flight.append(plan)
        if len(in_flight) == 2:
            maker.take(in_flight[0], runner.collect(in_flight.pop(0).step_id))
    maker.take(in_flight[0], runner.collect(in_flight[0].step_id))
    return [maker.sequences[name].output for name in names]


@pytest.mark.parametrize("num_shared", [0, 320])
def test_decode_graphs_with_and_without_prefix_match_eager(
    graphs: LocalRunner, eager: LocalRunner, num_shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[bool] = []
    no_shared_prefix = graphs._flags.no_shared_prefix

    def note(plan: StepPlan) -> bool:
        flags.append(no_shared_prefix(plan))
        return flags[-1]

    monkeypatch.setattr(graphs._flags, "no_shared_prefix", note)
    outputs = []
    for runner in (graphs, eager):
        maker = PlanMaker(runner.block_size)
        names = [f"s{slot}" for slot in range(18)]
        prefix = [(5 * i) % 983 for i in range(320)]
        maker.add("s0", [*prefix, 1], 0)
        maker.step(runner, chunks={"s0": 321})
        for slot, name in enumerate(names[1:], start=1):
            prompt = (
                [*prefix, *range(slot, slot + 4)] if num_shared else list(range(slot, slot + 20))
            )
            maker.add(name, prompt, slot, shared=("s0", num_shared) if num_shared else None)
        rest = {name: maker.sequences[name].num_prompt - num_shared for name in names[1:]}
        maker.step(runner, ["s0"], rest)
        for _ in range(12):
            maker.step(runner, names)
        outputs.append([maker.sequences[name].output for name in names])
    assert outputs[0] == outputs[1]
    assert flags == [num_shared == 0] * 12


@pytest.mark.parametrize("params", [[{}], PARAMS])
def test_overlapped_steps_change_no_token(
    graphs: LocalRunner, params: list[dict[str, Any]]
) -> None:
    expected = serve(graphs, 12, 40, params)
    graphs.forget()
    assert overlapped(graphs, 12, 40, params) == expected


@pytest.mark.parametrize("size", [1, 7, 40])
def test_chunks_mixed_with_decodes_change_no_token(
    graphs: LocalRunner, eager: LocalRunner, size: int
) -> None:
    expected = serve(eager, 6, 12, PARAMS)
    maker = PlanMaker(graphs.block_size)
    names = start(maker, 6, PARAMS)
    while any(len(maker.sequences[name].output) < 12 for name in names):
        rows = maker.sequences
        decodes = [n for n in names if rows[n].output and len(rows[n].output) < 12]
        chunks = {
            n: min(size, rows[n].num_prompt - rows[n].num_computed)
            for n in names
            if rows[n].num_computed < rows[n].num_prompt
        }
        maker.step(graphs, decodes, chunks)
    assert [maker.sequences[name].output for name in names] == expected


def test_launching_a_step_does_not_synchronize(graphs: LocalRunner) -> None:
    maker = PlanMaker(graphs.block_size)
    names = start(maker, 6, PARAMS)
    words = -(-1000 // 32)
    late = LateInputs(np.array([0], np.int32), np.full(words, -1, np.int32))
    kinds: list[tuple[list[str], dict[str, int], LateInputs | None]] = [
        ([], {name: maker.sequences[name].num_prompt for name in names[:5]}, None),
        (names[:5], {names[5]: maker.sequences[names[5]].num_prompt}, None),
        (names, {}, None),
        (names, {}, late),
        (names[:1], {}, None),
    ]
    results: list[StepResult] = []
    for decodes, chunks, mask in kinds:
        plan = maker.plan(decodes, chunks)
        torch.cuda.set_sync_debug_mode("error")
        try:
            graphs.forward(plan)
            graphs.sample(plan.step_id, mask)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append(graphs.collect(plan.step_id))
    assert [int(result.num_tokens.sum()) for result in results] == [5, 6, 6, 6, 1]


def test_serving_compiles_nothing_after_warmup(graphs: LocalRunner, eager: LocalRunner) -> None:
    from triton import knobs

    compiled: list[str] = []

    def note(**details: Any) -> None:
        compiled.append(details["repr"])

    knobs.runtime.jit_post_compile_hook = note
    try:
        for runner in (graphs, eager):
            for num_rows in (1, 2, 5, 16, 20):
                serve(runner, num_rows, 6, PARAMS)
                runner.forget()
            maker = PlanMaker(runner.block_size)
            for slot, length in enumerate((1, 15, 16, 64, 100, 255)):
                maker.add(f"s{slot}", [slot] * length, slot)
                maker.step(runner, [f"s{i}" for i in range(slot)], {f"s{slot}": length})
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert compiled == []


@contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Limit torch to this many more bytes."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def allocate_rest() -> Iterator[torch.Tensor]:
    """Allocate tensors until no memory is left."""
    for num_bytes in (16 << 20, 2 << 20, 1 << 20, 1 << 16, 512):
        with suppress(torch.OutOfMemoryError):
            while True:
                yield torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def test_out_of_memory_fails_only_its_step(eager: LocalRunner) -> None:
    expected = serve(eager, 4, 3, PARAMS[:1])
    eager.forget()
    maker = PlanMaker(eager.block_size)
    names = start(maker, 4, PARAMS[:1])
    plan = maker.plan(chunks={name: maker.sequences[name].num_prompt for name in names})
    with limited_memory(0):
        tensors = list(allocate_rest())
        with pytest.raises(OutOfMemory, match="Tried to allocate"):
            eager.forward(plan)
        tensors.clear()
    eager.forget()
    assert serve(eager, 4, 3, PARAMS[:1]) == expected


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [
        (0, "The (model|largest step).*Tried to allocate .*--"),
        (256 << 20, "0.38 GiB.*--max-total-tokens"),
    ],
    ids=["no memory", "no memory for the cache"],
)
def test_out_of_memory_at_start_names_the_flags(
    make: Callable[..., LocalRunner], num_bytes: int, message: str
) -> None:
    with limited_memory(num_bytes), pytest.raises(CapacityError, match=message):
        make(max_total_tokens=131072, enforce_eager=True)


def test_arena_size_leaves_room_for_the_largest_step(
    make: Callable[..., LocalRunner],
) -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    runner = make(max_total_tokens=None, gpu_memory_utilization=0.5, enforce_eager=True)
    arena, used = runner.num_pages * runner.layout.page_bytes, total - torch.cuda.mem_get_info()[0]
    runner.close()
    # Other programs use memory too, and may take or free some in between.
    assert 0.4 * total < total - free + arena < 0.55 * total
    assert arena < used
