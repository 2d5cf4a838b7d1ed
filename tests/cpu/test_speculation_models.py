"""Draft models: outputs do not depend on them, and their cache is right wherever the target's is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from draft_grammars import (
    BACKENDS,
    characters,
    grammar_backend,
    grammar_requests,
    grammars_of,
    num_matches,
    soaks,
)
from draft_requests import check, check_with_settings, engine_settings, few_examples
from draft_statistics import accept_by_force, chi_square, expected_counts
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
from tokenizers import Tokenizer
from tokenspeed_demo import CHECKPOINT, DEEPSEEK
from tokenspeed_demo.items import held_out_set
from tokenspeed_demo.render import TEMPLATE, Renderer
from tokenspeed_testing.drafts import FixedDepth
from tokenspeed_testing.requests import request

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.config import Config
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.errors import ConfigError, PluginError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.scheduler.drafts import FinishedStep
from tokenspeed_core.worker.assemble import plan_for
from tokenspeed_core.worker.local import LocalRunner, build
from tokenspeed_core.worker.staged import BucketSize

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9, "n": 2},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"min_tokens": 7, "stop_token_ids": np.arange(0, 1536, 7, dtype=np.int32)},
    {"logprobs": 3},
    {"prompt_logprobs": 1},
)


def engine_stats(engine: Engine) -> Any:
    return engine.scheduler.counters.snapshot(engine.scheduler.kv, 0)


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TEMPLATE.parent / "tokenizer.json"))
    renderer = Renderer()
    tasks = ("edit", "copy", "sum_three_digits")
    return [
        tokenizer.encode(renderer.prompt(item), add_special_tokens=False).ids
        for task in tasks
        for item in held_out_set(task, 3)
    ]


def requests() -> list[Submit]:
    made, number = [], 0
    for i, prompt in enumerate(prompts()):
        kind = KINDS[i % len(KINDS)]
        made.append(request(number, prompt, **{"max_tokens": 6 + 5 * i % 17, **kind}))
        number += kind.get("n", 1)
    return made


@pytest.fixture(scope="module")
def runner(catalog: Catalog) -> LocalRunner:
    """Return the small DeepSeek-V3 with its layer for multi-token prediction."""
    config = Config.from_keywords(
        model="demo-deepseek",
        device="cpu",
        dtype="float32",
        max_num_seqs=6,
        block_size=8,
        max_total_tokens=4096,
        chunked_prefill_size=256,
        speculative_config={"method": "mtp", "num_speculative_tokens": 4},
    )
    return build(resolve(config, catalog), catalog, lambda what, done, total: None)


@pytest.fixture(scope="module")
def expected(runner: LocalRunner) -> dict[int, Reply]:
    return finish(make_engine(runner), requests())


@pytest.mark.slow
@few_examples(3)
@given(chosen=engine_settings(4, [-1, 48, 77], 44))
def test_draft_layer_changes_no_output(
    runner: LocalRunner, expected: dict[int, Reply], chosen: dict[str, Any]
) -> None:
    check_with_settings(runner, requests(), expected, chosen, min_accepted=0.6)


def test_captured_draft_layer_changes_no_output(
    runner: LocalRunner, expected: dict[int, Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = capture_decodes(runner, (1, 4, 6), monkeypatch, with_prompts=True)
    engine = make_engine(runner, max_drafts=4, depth=2, chunk_size=32)
    check(finish(engine, requests(), preempt_every=9), expected)
    stats = engine_stats(engine)
    assert stats.num_accepted[0] > 0.6 * stats.num_draft_rows
    assert len({size for size in used if size.num_draft_tokens}) >= 2
    assert any(size.num_chunks for size in used)
    assert int(runner._state.seq_len[runner._state.layout.padding_slot]) == 0


@soaks(BACKENDS[0], 20)
@pytest.mark.timeout(1800)
def test_blocks_are_free_after_requests_with_aborts(
    runner: LocalRunner,
    catalog: Catalog,
    grammars: str,
    num_requests: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = grammar_backend(grammars, catalog, runner)
    made = random_requests([*requests(), *grammar_requests(backend, prompts())], num_requests)
    plain = finish(make_engine(runner, grammars=grammars_of(backend)), made[:20])
    capture_decodes(runner, (1, 4, 6), monkeypatch)
    engine = make_engine(
        runner,
        max_drafts=3,
        num_pages=60,
        depth=2,
        with_prompts=False,
        grammars=grammars_of(backend),
    )
    replies = soak(engine, made)
    check_starts(replies[:20], plain)
    assert num_matches(backend, replies) > 0.05 * num_requests
    assert engine_stats(engine).num_saved_steps > 0.5 * num_requests


def test_draft_layer_equals_the_trained_module(
    runner: LocalRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first draft token after each prefix of an answer is that of the module that was trained."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools/demo"))
    from demo_training.deepseek_v3 import DeepseekV3, DeepseekV3Config
    from safetensors.torch import load_file

    tokens = prompts()[0]
    model = DeepseekV3(DeepseekV3Config()).eval()
    size = model.config.moe_intermediate_size
    weights = load_file(Path(DEEPSEEK.path) / "model.safetensors")
    state = {}
    for name, value in model.state_dict().items():
        before, is_expert, after = name.partition(".experts.")
        axis = 1 if "down_proj" in name else 0
        if is_expert:
            parts = [
                weights[f"{before}.experts.{i}.{after}"] for i in range(value.shape[axis] // size)
            ]
            state[name] = torch.cat(parts, axis)
        else:
            state[name] = weights[name]
    model.load_state_dict({name: each.float() for name, each in state.items()})
    ids = torch.tensor([tokens])
    mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    with torch.no_grad():
        trained = model(ids, torch.arange(len(tokens))[None], mask)[1][0]

    seen: list[torch.Tensor] = []
    draft = runner._assembly.draft_model
    assert draft is not None
    logits = draft.logits

    def note(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits(hidden).clone())
        return logits(hidden)

    monkeypatch.setattr(draft, "logits", note)
    for length in (5, 23, len(tokens) - 2):
        seen.clear()
        engine = make_engine(runner, max_drafts=1, chunk_size=9)
        bias = {
            "bias_ids": np.asarray([tokens[length]], np.int32),
            "bias_values": np.full(1, 1e4, np.float32),
        }
        finish(engine, [request(0, tokens[:length], max_tokens=1, **bias)])
        assert torch.allclose(seen[-1][0], trained[length - 1], atol=2e-3), length


@pytest.fixture(scope="module")
def own_runner(tiny: Callable[..., Resolved], catalog: Catalog) -> LocalRunner:
    """Return a model that drafts for itself."""
    folder = str(tiny().checkpoint.path)
    resolved = tiny(speculative_config={"method": "draft_model", "model": folder})
    runner = build(resolved, catalog, lambda what, done, total: None)
    for model in (runner._model, runner._assembly.draft_model):
        for slot in model.weight_map():  # type: ignore[union-attr]
            if slot.kind != "norm":
                slot.target.mul_(12.0)
    return runner


@pytest.mark.parametrize(
    "case",
    [
        {"chunk_size": 5},
        {"chunk_size": -1, "max_prefill_tokens": 64, "caching": False},
        {"num_pages": 26, "preempt_every": 3},
        {"depth": 2, "chunk_size": 16},
    ],
)
def test_model_accepts_all_of_its_own_drafts(own_runner: LocalRunner, case: dict[str, Any]) -> None:
    """So its cache as a draft model is right, with chunks, prefix hits, rejected drafts and preemption."""
    random = np.random.default_rng(3)
    shared = random.integers(0, 97, 30).tolist()
    wanted = [
        request(
            i,
            (shared if i % 2 else []) + random.integers(0, 97, 3 + i).tolist(),
            max_tokens=10 + i,
            temperature=0.7 * (i % 3),
            seed=i,
        )
        for i in range(10)
    ]
    expected = finish(make_engine(own_runner), wanted)
    case = dict(case)
    preempt_every = case.pop("preempt_every", 0)
    engine = make_engine(own_runner, max_drafts=3, **case)
    check(finish(engine, wanted, preempt_every=preempt_every), expected)
    stats = engine_stats(engine)
    assert stats.num_draft_tokens > 60
    # Without free pages, entries of draft tokens are not kept, and the next ones are worse.
    share = 0.8 if "num_pages" in case else 0.99
    assert stats.num_saved_steps >= share * stats.num_draft_tokens


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_sampled_tokens_follow_the_distribution_of_the_model(
    own_runner: LocalRunner, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft tokens share the sampler's random numbers. Their distribution is flatter, and a share is accepted by force."""
    draft = own_runner._assembly.draft_model
    assert draft is not None
    logits = draft.logits
    monkeypatch.setattr(draft, "logits", lambda hidden: 0.1 * logits(hidden))
    sampling = {"temperature": 0.6, "top_k": 3}
    expected = expected_counts(own_runner, 300, 97, **sampling)
    if share:
        accept_by_force(own_runner, share, monkeypatch)
    engine = make_engine(own_runner, max_drafts=2)
    statistic = chi_square(engine, expected, **sampling)
    assert (statistic > 1) == (share > 0)
    stats = engine_stats(engine)
    assert 20 < stats.num_accepted[1] < 0.9 * stats.num_draft_rows


@soaks(BACKENDS[-1], 30)
@pytest.mark.timeout(1800)
def test_blocks_of_own_drafts_are_free_after_requests_with_aborts(
    own_runner: LocalRunner, catalog: Catalog, grammars: str, num_requests: int
) -> None:
    random = np.random.default_rng(9)
    found = [random.integers(0, 97, 4 + 3 * i).tolist() for i in range(9)]
    kinds = [
        request(i, each, max_tokens=4 + i, temperature=0.5 * i) for i, each in enumerate(found)
    ]
    backend = grammar_backend(grammars, catalog, own_runner, characters(97, " "))
    made = random_requests([*kinds, *grammar_requests(backend, found[:5])], num_requests)
    plain = finish(make_engine(own_runner, grammars=grammars_of(backend)), made[:30])
    engine = make_engine(
        own_runner, max_drafts=3, num_pages=40, depth=2, grammars=grammars_of(backend)
    )
    replies = soak(engine, made)
    check_starts(replies[:30], plain)
    assert num_matches(backend, replies) > 0.05 * num_requests
    assert engine_stats(engine).num_saved_steps > num_requests


@pytest.mark.parametrize("with_prompts", [False, True])
def test_captured_passes_accept_all_drafts(
    own_runner: LocalRunner, with_prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(7)
    wanted = [
        request(
            i,
            random.integers(0, 97, 5 + i).tolist(),
            max_tokens=20,
            temperature=0.7 * (i % 3),
            seed=i,
        )
        for i in range(7)
    ]
    expected = finish(make_engine(own_runner), wanted)
    used = capture_decodes(own_runner, (1, 4, 8), monkeypatch, with_prompts=True)
    engine = make_engine(
        own_runner, max_drafts=3, chunk_size=24, depth=2, with_prompts=with_prompts
    )
    check(finish(engine, wanted), expected)
    stats = engine_stats(engine)
    assert stats.num_saved_steps >= 0.99 * stats.num_draft_tokens > 60
    assert len({size for size in used if size.num_draft_tokens}) >= 2
    assert any(size.num_chunks for size in used)


class Alternating(FixedDepth):
    """Wants no draft tokens in a part of the steps."""

    num_calls = 0

    def max_drafts(self, num_rows: int) -> int:
        self.num_calls += 1
        return super().max_drafts(num_rows) * (self.num_calls // 8 % 2)


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.release), 2])
def test_captured_steps_may_follow_steps_of_a_draft_model(
    own_runner: LocalRunner, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(5)
    wanted = [
        request(i, random.integers(0, 97, 9 + i).tolist(), max_tokens=70 + i, temperature=0.4 * i)
        for i in range(5)
    ]
    expected = finish(make_engine(own_runner, seed=4), wanted)
    used = capture_decodes(own_runner, (1, 4, 8), monkeypatch)
    engine = make_engine(own_runner, max_drafts=3, depth=depth, draft_depth=Alternating(3), seed=4)
    check(finish(engine, wanted), expected)
    assert sum(not size.num_draft_tokens for size in used) > 5
    assert sum(size.num_draft_tokens > 0 for size in used) > 5
    assert engine_stats(engine).num_saved_steps > 10


class Pausing(FixedDepth):
    """Pauses for some steps, then wants draft tokens for as many, and so on."""

    def __init__(self, max_drafts: int, num_steps: int) -> None:
        super().__init__(max_drafts)
        self.num_finished, self.num_steps = 0, num_steps

    @property
    def is_paused(self) -> bool:  # type: ignore[override]
        return self.num_finished // self.num_steps % 2 == 0

    def max_drafts(self, num_rows: int) -> int:
        return super().max_drafts(num_rows) * (not self.is_paused)

    def finish_step(self, step: FinishedStep) -> None:
        self.num_finished += 1


@pytest.mark.parametrize(
    ("depth", "is_captured"),
    [
        (1, False),
        (2, True),
        pytest.param(1, True, marks=pytest.mark.release),
        pytest.param(2, False, marks=pytest.mark.release),
    ],
)
def test_pauses_change_no_output(
    runner: LocalRunner,
    expected: dict[int, Reply],
    depth: int,
    is_captured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the draft model followed no step, its cache holds NaN."""
    if is_captured:
        capture_decodes(runner, (1, 4, 6), monkeypatch, with_prompts=True)
    pausing = Pausing(3, num_steps=12)
    engine = make_engine(runner, max_drafts=3, depth=depth, chunk_size=32, draft_depth=pausing)
    runner._arena.fill_(255)
    try:
        check(finish(engine, requests(), preempt_every=9), expected)
    finally:
        runner._arena.zero_()
    assert engine_stats(engine).num_saved_steps > 5


@pytest.mark.parametrize("is_captured", [False, pytest.param(True, marks=pytest.mark.release)])
def test_paused_draft_model_does_not_run(
    runner: LocalRunner,
    expected: dict[int, Reply],
    is_captured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[BucketSize] = []
    if is_captured:
        used = capture_decodes(runner, (1, 4, 6), monkeypatch, with_prompts=True)
    drafter, num_calls = runner._drafter, 0
    assert drafter is not None
    extend = drafter.extend

    def note(*args: Any) -> torch.Tensor | None:
        nonlocal num_calls
        num_calls += 1
        return extend(*args)

    monkeypatch.setattr(drafter, "extend", note)
    pausing = Pausing(3, num_steps=1000)
    engine = make_engine(runner, max_drafts=3, depth=2, chunk_size=32, draft_depth=pausing)
    check(finish(engine, requests()), expected)
    assert num_calls == 0
    assert not any(size.is_followed for size in used)
    assert any(size.num_chunks for size in used) == is_captured
    pausing.num_finished = 1000
    check(finish(engine, requests()), expected)
    assert num_calls > 10
    assert any(size.is_followed for size in used) == is_captured


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (torch.Tensor.half, "torch.float16"),
        (lambda logits: logits.repeat(1, 2), "3072], expected"),
        (lambda logits: None, "NoneType"),
    ],
)
def test_failing_draft_model_is_named(
    runner: LocalRunner,
    change: Callable[[torch.Tensor], Any],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = runner._assembly.draft_model
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: change(logits(hidden)))
    finish(make_engine(runner, max_drafts=3), requests()[:1])
    (message,) = [each for each in caplog.messages if "failed" in each]
    assert problem in message
    assert "drafters mtp of tokenspeed-drafters" in message
    assert "--speculative-config" in message


def test_draft_model_is_not_named_if_the_model_fails(
    runner: LocalRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner._model, "forward", None)
    finish(make_engine(runner, max_drafts=3), requests()[:1])
    assert "forward failed" in caplog.text
    assert "drafters mtp" not in caplog.text


def test_wrong_draft_models_are_refused(tmp_path: Path) -> None:
    def load(**settings: Any) -> None:
        LLM(dtype="float32", device="cpu", **settings)

    with pytest.raises(ConfigError, match="no layers for multi-token prediction"):
        load(model="demo", speculative_algorithm="mtp")
    without = {"num_nextn_predict_layers": 0}
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        load(model="demo-deepseek", hf_overrides=without, speculative_algorithm="mtp")
    with pytest.raises(ConfigError, match="speculative-draft-model-path"):
        load(speculative_algorithm="draft_model")
    with pytest.raises(ConfigError, match=r"speculative-draft-model-path.*mtp"):
        load(
            model="demo-deepseek", speculative_algorithm="mtp", speculative_draft_model_path="demo"
        )
    for number in (0, 1000, True):
        with pytest.raises(ConfigError, match="num_speculative_tokens"):
            load(speculative_config={"method": "mtp", "num_speculative_tokens": number})
    config = json.loads((Path(DEEPSEEK.path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 1537}))
    with pytest.raises(ConfigError, match=r"1537.*1536"):
        load(speculative_config={"method": "draft_model", "model": str(tmp_path)})
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((Path(DEEPSEEK.path) / "tokenizer.json").read_text())
    tokens = list(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] = {token: i for i, token in enumerate(reversed(tokens))}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="another tokenizer than the target"):
        load(speculative_config={"method": "draft_model", "model": str(tmp_path)})


def test_draft_model_may_have_a_shorter_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_in_every_step(monkeypatch)
    folder = copytree(CHECKPOINT.path, tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    prompts = [{"prompt_token_ids": [5, 7, 9] * count} for count in (5, 20)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drafting = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    answers = []
    for speculation in (None, drafting):
        with LLM(
            "demo", dtype="float32", max_total_tokens=1024, speculative_config=speculation
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([list(each.outputs[0].token_ids) for each in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("setting", "family", "layer", "settings"),
    [
        ("draft_moe_backend", "moe", 4, {}),
        ("drafter_attention_backend", "attention", 4, {}),
        (
            "drafter_attention_backend",
            "attention",
            5,
            {
                "model": "demo",
                "speculative_algorithm": "eagle3",
                "speculative_draft_model_path": "demo-eagle3",
            },
        ),
    ],
)
def test_draft_backends_have_an_effect(
    catalog: Catalog, setting: str, family: str, layer: int, settings: dict[str, Any]
) -> None:
    """The flags select kernels for the layers of the draft model only."""

    def resolved(**changes: Any) -> Resolved:
        given = {"model": "demo-deepseek", "device": "cpu", "speculative_algorithm": "mtp"}
        return resolve(Config.from_keywords(**{**given, **settings, **changes}), catalog)

    plan = plan_for(resolved(**{setting: "torch"}), catalog, None)
    chosen = [op for op in plan.ops if op.family == family and op.asked_by != "auto"]
    assert chosen
    assert {each for op in chosen for each in op.layers} == {layer}
    with pytest.raises(PluginError, match="no-such"):
        plan_for(resolved(**{setting: "no-such"}), catalog, None)
    with pytest.raises(ConfigError, match=f"{setting}.*not a model".replace("_", "-")):
        resolve(Config.from_keywords(speculative_algorithm="suffix", **{setting: "torch"}), catalog)


def test_draft_layer_may_stay_unquantized(catalog: Catalog) -> None:
    def expert_ops(layer: int, **settings: Any) -> set[str]:
        config = Config.from_keywords(
            model="demo-deepseek",
            device="cpu",
            quantization="fp8",
            speculative_algorithm="mtp",
            **settings,
        )
        plan = plan_for(resolve(config, catalog), catalog, None)
        return {each.op for each in plan.find("moe", layer)}

    unquantized = {"speculative_draft_model_quantization": "unquant"}
    assert expert_ops(4) == expert_ops(3) == expert_ops(3, **unquantized)
    assert "moe_experts_fp8" in expert_ops(4)
    assert "moe_experts" in expert_ops(4, **unquantized)
    with pytest.raises(ConfigError, match=r"draft-model-quantization .*suffix is not a model"):
        resolve(Config.from_keywords(speculative_algorithm="suffix", **unquantized), catalog)
