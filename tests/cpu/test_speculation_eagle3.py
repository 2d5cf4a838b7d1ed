"""The demo's EAGLE-3 head: outputs do not depend on it, and most of its draft tokens are accepted."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from draft_grammars import (
    BACKENDS,
    grammar_backend,
    grammar_requests,
    grammars_of,
    num_matches,
    soaks,
)
from draft_requests import check, check_with_settings, engine_settings, few_examples
from drafted import (
    Reply,
    check_starts,
    draft_in_every_step,
    finish,
    make_engine,
    random_requests,
    soak,
)
from host_graphs import capture_decodes
from hypothesis import given
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenspeed_demo import EAGLE3
from tokenspeed_demo.items import held_out_set
from tokenspeed_demo.render import TEMPLATE, Renderer
from tokenspeed_testing.requests import request

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.errors import TokenSpeedError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.local import LocalRunner, build

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9, "n": 2},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"logprobs": 3, "prompt_logprobs": 2},
)


def prompts(num_items: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TEMPLATE.parent / "tokenizer.json"))
    renderer = Renderer()
    return [
        tokenizer.encode(renderer.prompt(item), add_special_tokens=False).ids
        for task in ("edit", "copy", "sum_three_digits")
        for item in held_out_set(task, num_items)
    ]


def requests() -> list[Submit]:
    made, number = [], 0
    for i, prompt in enumerate(prompts(2)):
        kind = KINDS[i % len(KINDS)]
        made.append(request(number, prompt, **{"max_tokens": 9 + 5 * i % 17, **kind}))
        number += kind.get("n", 1)
    return made


@pytest.fixture(scope="module")
def runner(catalog: Catalog) -> LocalRunner:
    config = Config.from_keywords(
        device="cpu",
        dtype="float32",
        max_num_seqs=6,
        block_size=8,
        max_total_tokens=4096,
        chunked_prefill_size=256,
        speculative_config={
            "method": "eagle3",
            "model": EAGLE3.name,
            "num_speculative_tokens": 5,
        },
    )
    return build(resolve(config, catalog), catalog, lambda what, done, total: None)


@pytest.fixture(scope="module")
def expected(runner: LocalRunner) -> dict[int, Reply]:
    return finish(make_engine(runner), requests())


@few_examples(2)
@given(chosen=engine_settings(5, [-1, 48, 77], 44))
def test_draft_head_does_not_change_the_output(
    runner: LocalRunner, expected: dict[int, Reply], chosen: dict[str, Any]
) -> None:
    check_with_settings(runner, requests(), expected, chosen, min_accepted=0.6)


@soaks(BACKENDS[-1], 20)
@pytest.mark.timeout(1800)
def test_blocks_are_free_after_requests_with_aborts(
    runner: LocalRunner, catalog: Catalog, grammars: str, num_requests: int
) -> None:
    backend = grammar_backend(grammars, catalog, runner)
    made = random_requests([*requests(), *grammar_requests(backend, prompts(1))], num_requests)
    plain = finish(make_engine(runner, grammars=grammars_of(backend)), made[:20])
    engine = make_engine(runner, max_drafts=5, num_pages=60, depth=2, grammars=grammars_of(backend))
    replies = soak(engine, made)
    check_starts(replies[:20], plain)
    assert num_matches(backend, replies) > 0.05 * num_requests
    assert engine.stats().num_saved_steps > num_requests


def test_captured_head_changes_no_output(
    runner: LocalRunner, expected: dict[int, Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(runner, max_drafts=5, depth=2, chunk_size=32)
    finish(engine, requests(), preempt_every=9)
    eager = engine.stats()
    used = capture_decodes(runner, (1, 2, 6), monkeypatch, with_prompts=True)
    engine = make_engine(runner, max_drafts=5, depth=2, chunk_size=32)
    check(finish(engine, requests(), preempt_every=9), expected)
    stats = engine.stats()
    # Rounding may change a draft token.
    assert stats.num_draft_tokens == pytest.approx(eager.num_draft_tokens, rel=0.05)
    assert sum(stats.num_accepted) == pytest.approx(sum(eager.num_accepted), rel=0.05)
    assert any(size.num_draft_tokens for size in used)
    assert any(size.num_chunks for size in used)


def test_settings_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of other engines select the head, and greedy answers take fewer steps."""
    draft_in_every_step(monkeypatch)
    given_flags: dict[str, Any] = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": EAGLE3.name,
        "speculative_num_steps": 4,
        "speculative_num_draft_tokens": 5,
        "speculative_eagle_topk": 1,
        "eagle3_layers_to_capture": "1,2,3",
    }
    wanted = [{"prompt_token_ids": ids} for ids in prompts(2)]
    params = SamplingParams(temperature=0, max_tokens=30)
    answers = []
    for flags in ({}, given_flags):
        with LLM(dtype="float32", max_num_seqs=6, max_total_tokens=2048, **flags) as llm:
            outputs = llm.generate(wanted, params, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            stats = llm.stats()
    assert answers[0] == answers[1]
    assert len(stats.num_accepted) == 4
    assert 1 + stats.num_saved_steps / stats.num_draft_rows > 2.5, "tokens per step"


def test_pickled_head_loads_next_to_a_safetensors_target(tmp_path: Path) -> None:
    source = Path(EAGLE3.path)
    copy(source / "config.json", tmp_path)
    torch.save(load_file(source / "model.safetensors"), tmp_path / "pytorch_model.bin")
    flags = {"speculative_algorithm": "eagle3", "speculative_draft_model_path": str(tmp_path)}
    assert "--speculative-draft-load-format pt" in refused(**flags)
    with LLM(max_total_tokens=2048, max_num_seqs=2, speculative_draft_load_format="pt", **flags):
        pass


def refused(**flags: Any) -> str:
    with pytest.raises(TokenSpeedError) as caught:
        LLM(device="cpu", **flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unusable_heads_are_refused_in_one_line(tmp_path: Path) -> None:
    def use(head: str | None, **settings: Any) -> str:
        named = {} if head is None else {"speculative_draft_model_path": head}
        return refused(**{"speculative_algorithm": "eagle3", **named, **settings})

    assert "--speculative-draft-model-path" in use(None)
    assert "no-such-head" in use("./no-such-head")
    fusion = {"tensor_parallel_size": 2, "enable_allreduce_fusion": True}
    assert "--enable-allreduce-fusion" in use(EAGLE3.name, **fusion)
    assert "architectures" in use("demo")
    assert "layers 1, 2, 3" in use(EAGLE3.name, model="demo-deepseek")
    assert "layers 1, 9" in use(EAGLE3.name, eagle3_layers_to_capture="1,9")
    assert "load_formats named 'no'" in use(EAGLE3.name, speculative_draft_load_format="no")
    assert "reads 3 layers" in use(EAGLE3.name, eagle3_layers_to_capture="1,2")
    config = json.loads((Path(EAGLE3.path) / "config.json").read_text())
    for key, value in (("hidden_size", 512), ("vocab_size", 2048)):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        assert str(value) in use(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    assert "safetensors" in use(str(tmp_path)), "no weights"
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"a": 1}}))
    assert "quantized" in use(str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"speculative_algorithm": "eagle3", "speculative_eagle_topk": 4}, "tree drafting"),
        ({"speculative_algorithm": "suffix", "eagle3_layers_to_capture": "1"}, "suffix"),
        ({"speculative_num_steps": 3}, "--speculative-num-steps"),
        ({"speculative_draft_load_format": "pt"}, "--speculative-draft-load-format"),
        (
            {"speculative_algorithm": "suffix", "speculative_draft_load_format": "pt"},
            "--speculative-draft-load-format has no effect with the drafter suffix",
        ),
        ({"speculative_algorithm": "eagle3", "speculative_num_steps": 0}, "num_steps 0"),
        (
            {
                "speculative_algorithm": "eagle3",
                "speculative_num_steps": 3,
                "speculative_num_draft_tokens": 3,
            },
            "contradicts",
        ),
        (
            {"speculative_config": {"method": "eagle3", "model": "x", "tree": [1]}},
            "no option tree",
        ),
        (
            {
                "speculative_config": {"method": "eagle3", "model": "x"},
                "eagle3_layers_to_capture": "1",
            },
            "layers_to_capture there",
        ),
        ({"speculative_config": "[1]"}, "JSON object"),
        ({"speculative_algorithm": "NEXTN"}, "use mtp"),
        ({"speculative_config": {"method": "deepseek_mtp"}}, "use mtp"),
        (
            {
                "speculative_algorithm": "eagle3",
                "speculative_draft_model_path": EAGLE3.name,
                "drafter_attention_backend": "fa3",
            },
            "Backends that fit: torch.",
        ),
    ],
)
def test_wrong_flags_are_refused_in_one_line(flags: dict[str, Any], named: str) -> None:
    assert named in refused(**flags)
