"""Start of a worker: block size, warm-up, bucket sizes, kernel plan and errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import annotated_types
import numpy as np
import pytest
import torch
from plugin_files import write_plugin

from tokenspeed_core.api.step import OutOfMemory
from tokenspeed_core.config import Config
from tokenspeed_core.errors import CapacityError, CheckpointError, ConfigError, PluginError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.worker import local, transfer
from tokenspeed_core.worker.buckets import (
    BucketFinder,
    bucket_sizes,
    decode_sizes,
    draft_sizes,
    followed_sizes,
)
from tokenspeed_core.worker.captured_inputs import captured_group_inputs
from tokenspeed_core.worker.local import LocalRunner, build, plan_only
from tokenspeed_core.worker.staged import BucketSize
from tokenspeed_core.worker.warmup import largest_step, warmup_steps, with_next_drafts

Make = Callable[..., Resolved]


def quiet(what: str, done: int, total: int) -> None:
    pass


def bounded(max_num_seqs: int, chunk_size: int) -> SchedulerLimits:
    return SchedulerLimits(max_num_seqs, 300, chunk_size, 8192, 0, 97)


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_warmup_steps_leave_slots_unchanged(
    make_runner: Callable[..., LocalRunner], max_drafts: int
) -> None:
    drafter = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 1 + max_drafts}
    runner = make_runner(**drafter) if max_drafts else make_runner()
    limits = runner.resolved.limits
    assert limits.max_drafts == max_drafts
    before = runner._state.words.clone()
    for step in (largest_step(limits, 1), *warmup_steps(limits, 1)):
        runner.forward(step.plan)
        runner.sample(step.plan.step_id, step.late)
        runner.collect(step.plan.step_id)
    runner.forget()
    assert runner._state.words.equal(before)


def test_largest_step_has_all_tokens_and_rows() -> None:
    plan = largest_step(bounded(max_num_seqs=8, chunk_size=2000), 1).plan
    assert plan.num_tokens == 2000
    assert plan.num_rows == 8
    assert plan.num_query_tokens.max() == 300
    assert (
        largest_step(bounded(max_num_seqs=64, chunk_size=16), 1).plan.num_query_tokens.tolist()
        == [1] * 64
    )


@pytest.mark.parametrize("chunk_size", [16, 2000, -1])
def test_largest_step_with_drafts_is_within_the_limits(chunk_size: int) -> None:
    limits = replace(bounded(max_num_seqs=8, chunk_size=chunk_size), max_drafts=4)
    plan = largest_step(limits, 1).plan
    assert plan.num_decodes == 7
    assert plan.num_draft_tokens == min(7 * 4, limits.max_num_tokens - 7)
    assert plan.num_tokens <= limits.max_num_tokens
    assert plan.draft_token_ids is not None
    assert len(plan.draft_token_ids) == plan.num_draft_tokens


def test_default_block_size_is_the_smallest_supported(catalog: Catalog, tiny: Make) -> None:
    runner = build(tiny(block_size=None), catalog, quiet)
    assert runner.block_size == 16
    assert runner.num_pages == 4096 // 16
    assert runner.layout.page_bytes == 2 * 2 * 16 * 2 * 16 * 4


def test_sampled_ids_fit_into_the_transfer_buffer() -> None:
    bounds = Config.model_fields["max_num_seqs"].metadata
    (most,) = (each.le for each in bounds if isinstance(each, annotated_types.Le))
    assert isinstance(most, int)
    rows = max(size.num_rows for size in bucket_sizes(decode_sizes(most, most, None), most, most))
    assert rows > most
    assert rows * np.dtype(np.int32).itemsize <= transfer._SMALLEST


def test_plan_without_weights_selects_the_same_kernels(
    catalog: Catalog, tiny: Make, runner: LocalRunner
) -> None:
    plan, memory, _ = plan_only(tiny(), catalog)
    assert plan == runner.kernel_plan
    assert memory["page_bytes"] == runner.layout.page_bytes
    assert memory["num_pages"] == runner.num_pages


def test_missing_backend_error_lists_installed_backends(catalog: Catalog, tiny: Make) -> None:
    with pytest.raises(PluginError, match=r"nonesuch(.|\n)*torch"):
        build(tiny(attention_backend="nonesuch"), catalog, quiet)


def test_checkpoint_without_weights_names_the_formats(catalog: Catalog, tiny: Make) -> None:
    with pytest.raises(CheckpointError, match="safetensors"):
        build(tiny(load_format="auto"), catalog, quiet)


def test_unknown_device_is_refused(catalog: Catalog, tiny: Make) -> None:
    with pytest.raises(ConfigError, match="auto, cpu, cuda"):
        build(tiny(device="abacus"), catalog, quiet)


@pytest.mark.parametrize(
    ("error", "subject"),
    [
        (torch.OutOfMemoryError, "The model"),
        (OutOfMemory, "The largest step"),
    ],
    ids=["weights", "a step"],
)
def test_out_of_memory_at_start_names_the_flags(
    error: type[Exception],
    subject: str,
    catalog: Catalog,
    tiny: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        raise error(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 139.80 GiB of which 3.00 GiB is free."
        )

    on_cpu = local.assemble
    monkeypatch.setattr(local, "resolve_device", lambda name: torch.device("meta"))
    monkeypatch.setattr(
        local,
        "assemble",
        lambda config, catalog, device, handles: on_cpu(config, catalog, torch.device("cpu")),
    )
    monkeypatch.setattr(
        local, "_load_weights" if error is torch.OutOfMemoryError else "LocalRunner", refuse
    )
    message = rf"^{subject} .*20.00 GiB.* 3.00 GiB .*--\w"
    with pytest.raises(CapacityError, match=message):
        local.build(tiny(), catalog, lambda what, done, total: None)


def test_memory_too_small_for_a_block_is_refused(catalog: Catalog, tiny: Make) -> None:
    with pytest.raises(CapacityError, match="--kv-cache-memory"):
        build(tiny(max_total_tokens=None, kv_cache_memory=100), catalog, quiet)


def test_buckets_at_most_double_the_tokens() -> None:
    sizes = [size for size in bucket_sizes((1, 2, 4, 256), 8192, 300) if size.num_chunks]
    assert max(size.num_chunk_tokens for size in sizes) == 4096
    assert sizes == [size for size in bucket_sizes((1, 2, 4, 256), 4096, 300) if size.num_chunks]
    for decodes, tokens in (
        (0, 1),
        (256, 3840),
        (17, 500),
        (65, 33),
        (1, 3000),
        (100, 3996),
        (0, 4096),
    ):
        fitting = [
            size.num_chunk_tokens
            for size in sizes
            if size.num_decodes >= decodes
            and size.num_chunk_tokens >= tokens
            and size.num_chunks >= min(tokens, 16)
        ]
        assert min(fitting) <= max(32, 2 * tokens)
    many = sorted(
        {
            size.num_chunk_tokens
            for size in sizes
            if size.num_chunk_tokens >= 1792 and not size.num_decodes
        }
    )
    assert many == [1792, 2048, 2560, 3072, 3584, 4096]
    few = [size.num_chunks for size in sizes if size.num_chunk_tokens <= 256]
    assert set(few) == {16}
    assert {size.num_chunks for size in sizes if size.num_chunk_tokens == 4096} == {64}
    full = [
        (size.num_decodes, size.num_chunk_tokens) for size in sizes if size.num_chunk_tokens > 3584
    ]
    assert full == [(0, 4096), (64, 4096), (128, 4032), (192, 3968), (256, 3904)]
    assert bucket_sizes((1,), 16, 1) == (
        BucketSize(1, 0, 0),
        BucketSize(0, 1, 16),
        BucketSize(1, 1, 16),
    )


def test_every_mixed_bucket_has_prompt_tokens() -> None:
    sizes = [
        size for size in bucket_sizes(decode_sizes(6000, 6000, None), 8192, 6000) if size.num_chunks
    ]
    assert all(size.num_chunk_tokens > 0 for size in sizes)
    assert {size.num_chunk_tokens for size in sizes if size.num_decodes in (3000, 4500)} == {
        2596,
        1096,
    }


@pytest.mark.parametrize(
    ("decodes", "chunks", "tokens", "expected"),
    [
        (0, 16, 20, BucketSize(0, 16, 32)),
        (0, 17, 20, BucketSize(0, 20, 320)),
        (1, 33, 33, BucketSize(64, 40, 640)),
        (0, 64, 64, BucketSize(0, 64, 1024)),
        (200, 1, 3896, BucketSize(256, 64, 3904)),
        (0, 1, 4097, None),
        (0, 1, 3700, BucketSize(0, 64, 4096)),
        (0, 65, 65, None),
        (257, 1, 1, None),
    ],
)
def test_step_gets_a_bucket_with_enough_rows(
    decodes: int, chunks: int, tokens: int, expected: BucketSize | None
) -> None:
    sizes = bucket_sizes((1, 256), 8192, 300)
    finder = BucketFinder([size for size in sizes if not size.no_shared_prefix])
    plan = replace(
        largest_step(bounded(max_num_seqs=300, chunk_size=8192), 1).plan,
        token_ids=np.zeros(tokens, np.int32),
        slots=np.zeros(decodes + chunks, np.int32),
        num_decodes=decodes,
    )
    assert finder.find(plan) == expected


@pytest.mark.parametrize("no_shared_prefix", [False, True])
@pytest.mark.parametrize("num_chunks", [0, 16])
def test_prefix_hints_concern_decodes_only(no_shared_prefix: bool, num_chunks: int) -> None:
    size = BucketSize(64, num_chunks, 32 if num_chunks else 0, no_shared_prefix)
    inputs = captured_group_inputs(
        size,
        kv_slots=torch.zeros(96, dtype=torch.int64),
        table=torch.zeros((80, 4), dtype=torch.int32),
        seq_lens=torch.zeros(80, dtype=torch.int32),
        decode_start=torch.arange(81, dtype=torch.int32),
        chunk_start=torch.zeros(17, dtype=torch.int32) if num_chunks else None,
        max_model_len=10_000,
    )
    decodes = inputs.decodes or inputs.step
    assert decodes.shares_prefix != no_shared_prefix
    assert decodes.overlaps_prefill == (num_chunks > 0)
    assert (decodes.num_rows, decodes.max_seq_len) == (64, 4096 if no_shared_prefix else 10_000)
    prompts = inputs.prefills
    assert (prompts is None) == (num_chunks == 0)
    if prompts is not None:
        assert prompts.shares_prefix
        assert not prompts.overlaps_prefill
        assert prompts.max_seq_len == 10_000
        assert (prompts.num_rows, prompts.num_tokens, len(prompts.block_table)) == (16, 32, 16)


def test_many_decodes_have_a_bucket_without_shared_prefix() -> None:
    sizes = bucket_sizes((1, 8, 16, 64, 256), 8192, 256)
    plain = {(size.num_decodes, size.num_chunk_tokens) for size in sizes if size.no_shared_prefix}
    tokens = (32, 64, 128, 192, 256, 320, 384, 448, 512)
    assert plain == {
        (16, 0),
        (64, 0),
        (256, 0),
        *((decodes, count) for decodes in (64, 256) for count in tokens),
    }
    assert len(set(sizes)) == len(sizes)
    assert {
        replace(size, no_shared_prefix=True) for size in sizes if not size.no_shared_prefix
    } > set(sizes[-len(plain) :])


def test_few_steps_are_captured_by_default() -> None:
    # Each takes about 0.1 s of a start on an H200.
    assert len(bucket_sizes(decode_sizes(256, None, None), 8192, 256)) == 134


def test_capture_sizes_reach_max_num_seqs() -> None:
    assert decode_sizes(20, None, None) == (1, 2, 4, 8, 16, 20)
    assert decode_sizes(1000, None, None)[7:] == (40, 48, 56, 64, *range(80, 257, 16))
    assert decode_sizes(1000, 16, None) == (1, 2, 4, 8, 16)
    assert decode_sizes(3, None, None) == (1, 2, 3)
    assert decode_sizes(1, None, None) == (1,)
    assert decode_sizes(64, None, (32, 8, 128)) == (8, 32)
    with pytest.raises(ConfigError, match="--enforce-eager"):
        decode_sizes(4, None, (8, 16))


def test_few_buckets_hold_draft_tokens() -> None:
    sizes = draft_sizes(decode_sizes(256, None, None), 8, 2048)
    assert len(sizes) == 20
    assert [size.num_tokens for size in sizes if size.num_decodes == 1] == [5, 9]
    assert [size.num_tokens for size in sizes if size.num_decodes == 16] == [32, 48, 80, 144]
    assert {size.num_decodes for size in sizes} == {1, 2, 4, 8, 16, 32, 64}
    assert draft_sizes(decode_sizes(256, None, None), 0, 0) == ()
    assert draft_sizes((20,), 1, 20) == (BucketSize(20, 0, 0, num_draft_tokens=20),)
    few = draft_sizes((1, 8, 16, 20), 3, 16)
    assert [(size.num_decodes, size.num_draft_tokens) for size in few] == [
        (1, 3),
        (8, 16),
        (16, 16),
        (20, 16),
    ]


@pytest.mark.parametrize(
    ("num_parameters", "largest"), [(5_000_000, 4096), (1_700_000_000, 2560), (8_000_000_000, 512)]
)
def test_draft_model_follows_captured_steps_that_are_slow_to_launch(
    num_parameters: int, largest: int
) -> None:
    decodes = decode_sizes(64, None, None)
    sizes = bucket_sizes(decodes, 8192, 64) + draft_sizes(decodes, 8, 2048)
    followed = followed_sizes(sizes, num_parameters)
    tokens = {size.num_chunk_tokens for size in followed}
    assert {32, 64, 128, 256, 512} <= tokens
    assert max(tokens) == largest
    assert all(size.is_followed and replace(size, is_followed=False) in sizes for size in followed)


def test_finder_keeps_followed_steps_apart() -> None:
    sizes = bucket_sizes((1, 16, 64), 8192, 64)
    finder = BucketFinder([*sizes, *followed_sizes(sizes, 10**9)])
    plan = largest_step(bounded(max_num_seqs=64, chunk_size=1000), 1).plan
    usual = finder.find(plan)
    followed = finder.find(with_next_drafts(plan, 2))
    assert usual is not None
    assert followed == replace(usual, is_followed=True)


@pytest.mark.parametrize(
    ("num_drafts", "expected"),
    [([1], (1, 4)), ([5], (1, 8)), ([8, 0, 1], (4, 16)), ([8, 8, 8], (4, 32)), ([1] * 65, None)],
)
def test_step_with_drafts_gets_a_bucket_with_enough_tokens(
    num_drafts: list[int], expected: tuple[int, int] | None
) -> None:
    finder = BucketFinder(draft_sizes(decode_sizes(256, None, None), 8, 2048))
    ones = np.ones(len(num_drafts), np.int32)
    plan = replace(
        largest_step(bounded(max_num_seqs=300, chunk_size=8192), 1).plan,
        token_ids=np.zeros(0, np.int32),
        slots=ones,
        num_query_tokens=ones + np.array(num_drafts, np.int32),
        num_decodes=len(num_drafts),
        num_draft_tokens=sum(num_drafts),
    )
    size = finder.find(plan)
    assert expected == (size and (size.num_decodes, size.num_draft_tokens))
    mixed = replace(plan, slots=np.ones(len(num_drafts) + 1, np.int32))
    assert finder.find(mixed) is None


@pytest.mark.parametrize("takes_drafts", [False, True])
def test_draft_tokens_run_in_the_phase_that_takes_them(takes_drafts: bool) -> None:
    inputs = captured_group_inputs(
        BucketSize(4, 0, 0, num_draft_tokens=12),
        kv_slots=torch.zeros(16, dtype=torch.int64),
        table=torch.zeros((8, 4), dtype=torch.int32),
        seq_lens=torch.zeros(8, dtype=torch.int32),
        decode_start=torch.zeros(5, dtype=torch.int32),
        chunk_start=None,
        max_model_len=10_000,
        max_drafts=8,
        takes_drafts=takes_drafts,
    )
    step = inputs.step
    assert (step.num_rows, step.num_tokens, step.max_num_query) == (4, 16, 9)
    assert inputs.num_decodes == (4 if takes_drafts else 0)


def test_failing_family_is_named_in_one_line(catalog: Catalog, tiny: Make) -> None:
    resolved = tiny()
    spec = replace(resolved.checkpoint.spec, load="no_such_module:Model")
    with pytest.raises(PluginError, match=r"Qwen3ForCausalLM .*no_such_module:Model"):
        build(replace(resolved, checkpoint=replace(resolved.checkpoint, spec=spec)), catalog, quiet)


@pytest.mark.parametrize(
    ("reader", "why"),
    [
        ("no_such_module:read", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("acme_reader:read", "ModuleNotFoundError: No module named 'acme_lib'"),
        ("acme_format:FORMAT", "returned LoadFormat, expected Callable"),
    ],
)
def test_failing_load_format_is_named_with_its_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Make, reader: str, why: str
) -> None:
    spec = (
        f"from tokenspeed_core.api import LoadFormat\nFORMAT = LoadFormat('acme', {reader!r}, ())\n"
    )
    entries = {"acme": "acme_format:FORMAT [api1]"}
    modules = {"acme_format": spec, "acme_reader": "import acme_lib\n"}
    write_plugin(tmp_path, "acme-format", "load_formats", entries, modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError) as caught:
        build(tiny(load_format="acme"), Catalog.discover(), quiet)
    del sys.modules["acme_format"]
    message = str(caught.value)
    names = ("acme-format 1.0", reader, why, "--load-format", "TOKENSPEED_PLUGINS=-acme-format")
    assert all(name in message for name in names)
    assert "\n" not in message
