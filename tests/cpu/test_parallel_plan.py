"""The collectives that the commands print, and those that the documentation of parallelism shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_models_deepseek import V3
from test_models_describe import QWEN3_30B

from tokenspeed_core.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
# A collective and its number, processes and bytes, and the line with its reason.
COLLECTIVE = re.compile(
    r"^ +(\d+) x (\w+) \((\w+), (\d+) processes\): ([\d,]+) B per token.*\n +(.*)$", re.MULTILINE
)
SENT = re.compile(r"^collectives: .*?([\d,]+) B per token.*?([\d,]+) B .*per sampled", re.MULTILINE)
QWEN3_MOE = {**QWEN3_30B, "architectures": ["Qwen3MoeForCausalLM"], "rms_norm_eps": 1e-6}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": QWEN3_MOE,
    "Qwen3-235B-A22B": {
        **QWEN3_MOE,
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    },
    "Llama 3.1 70B": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "dtype": "bfloat16",
    },
    "DeepSeek V3 in bf16": V3,
}
Print = Callable[..., str]

pytestmark = pytest.mark.tree


@pytest.fixture
def why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Print:
    """Return a function that prints the collectives of a model with some flags."""

    def run(model: str, *flags: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]))
        command = ("plugins", "why", "comm", str(tmp_path), "--platform", "cpu")
        assert main([*command, *flags]) == 0
        return capsys.readouterr().out

    return run


def number(text: str) -> int:
    return int(text.replace(",", ""))


def sent(output: str) -> int:
    """Return the bytes that a process sends for a token."""
    found = SENT.search(output)
    assert found, output
    return number(found[1])


def table(header: str) -> list[list[str]]:
    """Return the rows of the documentation's table whose header starts with these cells."""
    after = PAGE.read_text().partition(f"\n{header}")[2]
    lines = after.partition("\n\n")[0].splitlines()[2:]
    assert lines, f"no table {header!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rows(header: str, *by_default: int) -> list[Any]:
    """Return the rows of a table as parameters. The release tests check those that are not named."""
    return [
        pytest.param(
            row,
            id=" ".join(row[:3:2]),
            marks=() if index in by_default else pytest.mark.release,
        )
        for index, row in enumerate(table(header))
    ]


@pytest.mark.parametrize("words", [("serve", "--dry-run"), ("plugins", "why", "comm")])
def test_commands_print_collectives_with_bytes_and_reasons(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main([*words, "demo", "--tp", "2", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    found = COLLECTIVE.findall(output)
    # The demo has 5 layers, 256 features and a vocabulary of 1536 in bfloat16.
    assert [each[:5] for each in found] == [
        ("1", "all_reduce", "attn", "2", "512"),
        ("5", "all_reduce", "attn", "2", "512"),
        ("4", "all_reduce", "dense", "2", "512"),
        ("1", "all_reduce", "dense", "2", "512"),
        ("1", "all_gather", "attn", "2", "3,072"),
    ]
    ends = [("embedding", "input_norm"), ("attention.out", "post_norm"), ("mlp.down", "input_norm")]
    ends += [("mlp.down", "norm"), ("head", "sampling")]
    for (*_, reason), (source, target) in zip(found, ends, strict=True):
        assert re.search(rf"\b{source}\b.*\b{target}\b", reason), reason
    totals = SENT.search(output)
    assert totals
    assert [number(each) for each in totals.groups()] == [11 * 512, 3072 // 2]


DRAFT = re.compile(
    r"^collectives of the draft model: .* ([\d,]+) B per token.*?([\d,]+) B .*per draft",
    re.MULTILINE,
)
DRAFT_MODELS = {
    "demo-deepseek": (("--speculative-algorithm", "mtp"), ("moe", "3,072")),
    "demo": (
        ("--speculative-algorithm", "eagle3", "--speculative-draft-model-path", "demo-eagle3"),
        ("dense", "2,048"),  # the head has 1024 of 1536 tokens
    ),
}


@pytest.mark.parametrize("model", DRAFT_MODELS)
@pytest.mark.parametrize("words", [("serve", "--dry-run"), ("plugins", "why", "comm")])
def test_commands_print_collectives_of_draft_models(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], model: str
) -> None:
    flags, (mlp_group, logits) = DRAFT_MODELS[model]
    command = [*words, model, "--tp", "2", "--device", "cpu"]
    assert main(command) == 0
    alone = capsys.readouterr().out
    assert main([*command, *flags]) == 0
    of_target, heading, of_draft = capsys.readouterr().out.partition("\ncollectives of the draft")
    assert COLLECTIVE.findall(of_target) == COLLECTIVE.findall(alone)
    assert sent(of_target) == sent(alone)
    assert [each[:5] for each in COLLECTIVE.findall(of_draft)] == [
        ("1", "all_reduce", "attn", "2", "512"),  # the target's embedding
        ("1", "all_reduce", "attn", "2", "512"),
        ("1", "all_reduce", mlp_group, "2", "512"),
        ("1", "all_gather", "attn", "2", logits),
    ]
    totals = DRAFT.search(heading + of_draft)
    assert totals
    assert [number(each) for each in totals.groups()] == [3 * 512, number(logits) // 2]


@pytest.mark.parametrize(("model", "has_experts"), [("demo", False), ("demo-deepseek", True)])
def test_sizes_of_experts_are_printed_for_models_with_experts(
    capsys: pytest.CaptureFixture[str], model: str, has_experts: bool
) -> None:
    assert main(["serve", "--dry-run", model, "--tp", "2", "--device", "cpu"]) == 0
    (line,) = (
        each for each in capsys.readouterr().out.splitlines() if each.startswith("processes")
    )
    assert "dense TP 2" in line
    assert ("MoE TP 2, EP 1" in line) is has_experts


@pytest.mark.parametrize("words", [("serve", "--dry-run"), ("plugins", "why", "comm")])
def test_commands_print_the_group_that_shares_mlps(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    flags = ("--tp", "4", "--dense-tp-size", "2", "--enable-allreduce-fusion")
    assert main([*words, "demo", *flags, "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    found = COLLECTIVE.findall(output)
    assert [each[:5] for each in found] == [
        ("1", "all_reduce", "attn", "4", "512"),
        ("5", "all_reduce", "attn", "4", "512"),
        ("4", "all_reduce", "dense", "2", "512"),
        ("1", "all_reduce", "dense", "2", "512"),
        ("1", "all_gather", "attn", "4", "3,072"),
    ]
    # Among more than two processes, 512 KiB of the 512 B of a token are fused.
    assert re.findall(r"(attn|dense), .* steps of up to ([\d,]+) tokens", output) == [
        ("attn", "1,024"),
        ("dense", "8,192"),
        ("dense", "8,192"),
    ]
    totals = SENT.search(output)
    assert totals
    # In a ring of n processes, each sends 2 (n - 1) / n of the bytes, and (n - 1) / n of the logits.
    expected = [(6 * 3 + 5 * 2) * 512 // 2, 3072 * 3 // 4]
    assert [number(each) for each in totals.groups()] == expected


@pytest.mark.parametrize(
    ("flags", "op"),
    [
        (("--enable-allreduce-fusion",), "all_reduce_add_rms_norm"),
        (("--kernel-backend", "all_reduce=symm"), "all_reduce"),
    ],
)
def test_kernels_of_one_node_are_refused_over_several(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], op: str
) -> None:
    words = ("plugins", "why", "comm", "demo", "--tp", "2", "--platform", "sm90", *flags)
    assert main(list(words)) == 0
    capsys.readouterr()
    assert main([*words, "--nnodes", "2", "--dist-init-addr", "node0:29500"]) != 0
    printed = capsys.readouterr()
    assert "num_nodes 2 is above 1" in printed.out
    assert op in printed.err


def test_size_of_mlp_groups_is_refused_for_models_without_mlps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    command = ("plugins", "why", "comm", str(tmp_path), "--platform", "cpu")
    assert main([*command, "--tp", "4", "--dense-tp-size", "2"]) == 2
    assert "--dense-tp-size has no effect: Qwen3MoeForCausalLM" in capsys.readouterr().err


def test_documented_collectives_are_printed(why: Print) -> None:
    shown = re.findall(
        r"[Ff]or (\S[^`]*) with `([^`]+)`:\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    models = ["Qwen3-30B-A3B", "DeepSeek V3 in bf16", "Llama 3.1 70B"]
    assert [model for model, *_ in shown] == models
    for model, flags, lines in shown:
        assert lines in why(model, *flags.split())


@pytest.mark.parametrize("row", rows("| engines | `torch`, `nccl` | `alltoall` |", 1))
def test_documented_bytes_of_engines_that_share_experts(why: Print, row: list[str]) -> None:
    flags = ("--data-parallel-size", row[0], "--enable-expert-parallel", "--all2all-backend")
    found = [sent(why("Qwen3-30B-A3B", *flags, backend)) for backend in ("torch", "alltoall")]
    assert [f"{each:,}" for each in found] == row[1:]


@pytest.mark.parametrize("row", rows("| model | GPUs |", 0, 1))
def test_documented_plan_is_printed(why: Print, row: list[str]) -> None:
    model, gpus, flags, _, collectives, bytes_per_token, seconds = row
    words = flags.strip("`").split()
    output = why(model, *words)
    num_engines = int(words[1]) if words[0] == "--data-parallel-size" else 1
    counts: dict[tuple[str, str], int] = {}
    for count, op, _, processes, size, _ in COLLECTIVE.findall(output):
        # All processes, those of an engine, or one of each engine.
        assert int(processes) in (int(gpus), int(gpus) // num_engines, num_engines)
        if op != "all_gather":  # of the logits
            key = (op, f"{number(size) // 1024} KiB")
            counts[key] = counts.get(key, 0) + int(count)
    assert (
        ", ".join(f"{count} {op} of {size}" for (op, size), count in counts.items()) == collectives
    )
    # With data parallelism, a process sends the tokens of its engine only.
    share = sent(output) / num_engines
    assert f"{share / 1e3:,.0f} KB" == bytes_per_token
    assert seconds == (f"{8192 * share / 350e9 * 1e3:.0f} ms" if gpus == "8" else "")


@pytest.mark.release
@pytest.mark.parametrize("row", rows("| model | GPUs |"))
def test_documented_weights_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[row[0]]))
    command = ("serve", "--dry-run", str(tmp_path), "--device", "cpu", "--load-format", "dummy")
    small = ("--skip-tokenizer-init", "--max-model-len", "256")
    assert main([*command, *small, *row[2].strip("`").split()]) == 0
    found = re.search(r"weight_bytes: ([\d,]+)", capsys.readouterr().out)
    assert found
    assert f"{number(found[1]) / 2**30:.1f} GiB" == row[3]
