"""`LLM` computes the same tokens and log-probabilities as transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from family_checks import NEAR, Family, check_engine, greedy, prompts
from tiny_families import FAMILIES
from transformers import MinNewTokensLengthLogitsProcessor

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.engine.inputs import EncodedPrompt
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.engine.outputs import SequenceOutput
from tokenspeed_core.errors import TokenSpeedError

pytestmark = pytest.mark.slow

CONTEXT = 128  # of the tiny checkpoints
EOS = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "one step a prompt": {},
    "chunks of 5": {"chunked_prefill_size": 5},
    "chunks of 16, blocks of 3": {"chunked_prefill_size": 16, "block_size": 3},
    "no chunks": {"chunked_prefill_size": -1, "max_prefill_tokens": 20},
    "two at once": {"max_num_seqs": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "a step ahead": {"depth": 2, "chunked_prefill_size": 16},
}
# These differ from others only in parts that are compared without an engine, such as routing, soft caps and names of weights.
SIMILAR = ("DeepseekV2", "Gemma2", "Glm4MoeLite", "Mixtral", "Olmo2", "Phi3")
# Qwen3 runs every case. The others differ in their layers, which one or two cases of each test cover.
BRIEF: dict[str, tuple[Any, ...]] = {
    "DeepseekV3": ("a step ahead", "cpu", 1),
    "Gemma3": ("chunks of 16, blocks of 3", "no chunks", (16, 2), 2),
    "Llama": ("two at once",),
    "Mistral": ("chunks of 5", (16, 2)),
    "Qwen2": ("chunks of 16, blocks of 3",),
    "Qwen3Moe": ("no prefix cache", (-1, 1)),
    "Glm4Moe": ("chunks of 16, blocks of 3",),
    "GptOss": ("chunks of 16, blocks of 3", "cpu"),
    "Llama4": ("chunks of 16, blocks of 3", "cpu"),
    "MiniMaxM2": ("a step ahead",),
    "Olmo3": ("chunks of 5",),
}


def with_families(*cases: Any) -> list[Any]:
    """Return all pairs of a family and a case. The `release` checks run those that cost more than they show."""

    def is_slow(family: str, case: Any) -> bool:
        return family in SIMILAR or (family in BRIEF and case not in BRIEF[family])

    return [
        pytest.param(family, case, marks=pytest.mark.release if is_slow(family, case) else ())
        for family in FAMILIES
        for case in cases
    ]


Reference = Callable[[tuple[int, ...]], torch.Tensor]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    return cache(lambda name: Family(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def qwen3(families: Callable[[str], Family]) -> Family:
    return families("Qwen3")


@pytest.fixture(scope="module")
def llm(qwen3: Family) -> Iterator[LLM]:
    with qwen3.start() as started:
        yield started


def drive(llm: LLM, submits: list[Submit]) -> tuple[dict[int, list[int]], dict[int, FinishReason]]:
    """Submit one request per step; return the tokens and the finish reason of each sequence."""
    engine, waiting = llm._engine, list(submits)
    tokens: dict[int, list[int]] = {submit.request_id: [] for submit in submits}
    finish: dict[int, FinishReason] = {}
    while waiting or engine.has_work:
        if waiting:
            assert engine.submit(waiting.pop(0)) is None
        for outputs in engine.step():
            at = 0
            columns = (
                outputs.sequence_ids.tolist(),
                outputs.num_tokens.tolist(),
                outputs.finish.tolist(),
            )
            for key, num, end in zip(*columns, strict=True):
                tokens[key] += outputs.token_ids[at : at + num].tolist()
                at += num
                if end:
                    finish[key] = FinishReason(end)
    return tokens, finish


def generate_one(llm: LLM, prompt: list[int], params: SamplingParams) -> SequenceOutput:
    """Generate for one prompt alone."""
    return llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0]


def run(
    llm: LLM, wanted: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[int]]:
    """Generate for prompts together."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in wanted], params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(("family", "setting"), with_families(*SETTINGS))
def test_greedy_tokens_equal_transformers(
    families: Callable[[str], Family], family: str, setting: str
) -> None:
    model, wanted = families(family), prompts()
    params = [greedy(5 + 3 * i % 8) for i in range(len(wanted))]
    with model.start(**SETTINGS[setting]) as llm:
        for _ in range(2):  # the second time with hits
            for prompt, tokens, each in zip(wanted, run(llm, wanted, params), params, strict=True):
                assert len(tokens) == each.max_tokens
                model.check_greedy(prompt, tokens)


@pytest.mark.parametrize(("family", "device"), with_families("cpu"))
def test_small_pool_does_not_change_results(
    families: Callable[[str], Family], family: str, device: str
) -> None:
    check_engine(families(family), device, depth=1)  # tests/gpu/test_families.py runs it on a GPU


@pytest.mark.parametrize(("family", "chunk_and_depth"), with_families((-1, 1), (16, 2)))
def test_greedy_tokens_survive_preemption(
    families: Callable[[str], Family], family: str, chunk_and_depth: tuple[int, int]
) -> None:
    chunk, depth = chunk_and_depth
    model, wanted = families(family), [[i] for i in range(60, 72)] + prompts()
    small: dict[str, Any] = {"max_total_tokens": 112, "max_model_len": 100, "max_num_seqs": 16}
    with model.start(depth, chunked_prefill_size=chunk, **small) as llm:
        for prompt, tokens in zip(wanted, run(llm, wanted, greedy(24)), strict=True):
            assert len(tokens) == 24
            model.check_greedy(prompt, tokens)
        scheduler = llm._engine.scheduler
        assert scheduler.num_preemptions > 0, "the pool was too large for this test"
        pool = scheduler.kv.pool
        assert pool.num_available == pool.num_pages, "pages are held when idle"


@pytest.mark.parametrize(("family", "depth"), with_families(1, 2))
def test_greedy_tokens_do_not_depend_on_arrival(
    families: Callable[[str], Family], family: str, depth: int
) -> None:
    model, wanted = families(family), prompts()
    params = greedy(12)
    with model.start(depth, chunked_prefill_size=9, max_num_seqs=4) as llm:
        submits = [
            llm._build_submit(EncodedPrompt(None, np.array(prompt, np.int32)), params)
            for prompt in wanted
        ]
        got, _ = drive(llm, submits[::-1])  # the longest first
    for submit in submits:
        assert len(got[submit.request_id]) == 12
        model.check_greedy(submit.prompt.tolist(), got[submit.request_id])


def test_repeated_prompt_is_cached_until_reset(qwen3: Family) -> None:
    prompt = {"prompt_token_ids": prompts()[9]}
    with qwen3.start() as llm:
        cached = [llm.generate(prompt, greedy(3))[0].num_cached_tokens for _ in range(2)]
        llm.reset_prefix_cache()
        cached.append(llm.generate(prompt, greedy(3))[0].num_cached_tokens)
    assert cached == [0, 56, 0]  # of 60 tokens in blocks of 4, the last block's logits being needed


def test_concurrent_prompts_compute_a_shared_prefix_once(qwen3: Family) -> None:
    shared = prompts()[9]
    with qwen3.start(max_num_seqs=32) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": [*shared[:40], i + 3]} for i in range(32)], greedy(4)
        )
    assert [output.num_cached_tokens for output in outputs] == [0] + [40] * 31
    for output in outputs:
        qwen3.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)


def test_n_sequences_differ_and_are_reproducible(llm: LLM, qwen3: Family) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7]}
    same = llm.generate(prompt, greedy(9, n=3))[0].outputs
    assert [output.index for output in same] == [0, 1, 2]
    assert same[0].token_ids == same[1].token_ids == same[2].token_ids
    qwen3.check_greedy([5, 6, 7], same[0].token_ids)
    params = SamplingParams(temperature=20, n=4, seed=9, max_tokens=12, ignore_eos=True)
    first, second = (
        [output.token_ids for output in llm.generate(prompt, params)[0].outputs] for _ in range(2)
    )
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 4


def test_seeded_tokens_do_not_depend_on_the_batch(llm: LLM) -> None:
    wanted = prompts()
    seeded = SamplingParams(
        temperature=5, top_p=0.95, top_k=50, seed=123, max_tokens=20, ignore_eos=True
    )
    alone = [generate_one(llm, prompt, seeded).token_ids for prompt in wanted]
    others = [
        seeded,
        greedy(20),
        seeded.model_copy(update={"seed": 5}),
        greedy(20, presence_penalty=1, logprobs=3),
    ]
    mixed = run(llm, wanted, [others[i % 4] for i in range(len(wanted))])
    assert run(llm, wanted, seeded) == alone
    assert mixed[::4] == alone[::4]
    assert mixed[2] != alone[2], "another seed draws the same"


def test_unseeded_requests_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=20, max_tokens=12, ignore_eos=True)
    drawn = run(llm, [[5, 6, 7]] * 5, params)
    assert len({tuple(tokens) for tokens in drawn}) == 5


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_logprobs_equal_transformers(llm: LLM, qwen3: Family, temperature: float) -> None:
    wanted = prompts()
    top_5 = SamplingParams(
        temperature=temperature, logprobs=5, max_tokens=10, seed=1, ignore_eos=True
    )
    top_0 = top_5.model_copy(update={"logprobs": 0})
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in wanted],
        [top_0 if i % 3 == 2 else top_5 for i in range(len(wanted))],
    )
    for i, output in enumerate(outputs):
        tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
        assert entries is not None
        expected = qwen3.logits((*output.prompt_token_ids, *tokens)).log_softmax(-1)
        for at, (token, entry) in enumerate(
            zip(tokens, entries, strict=True), len(output.prompt_token_ids) - 1
        ):
            assert {key: value.logprob for key, value in entry.items()} == pytest.approx(
                {key: float(expected[at, key]) for key in entry}, abs=NEAR
            )
            best = expected[at].topk(5)
            assert entry[token].rank >= 1
            assert temperature or entry[token].rank == 1
            if i % 3 == 2:
                assert list(entry) == [token]
            else:
                assert sorted((v.logprob for v in entry.values()), reverse=True)[
                    :5
                ] == pytest.approx(best.values.tolist(), abs=NEAR)
                assert len(entry) == (5 if entry[token].rank <= 5 else 6)


def test_logprobs_survive_preemption(qwen3: Family) -> None:
    wanted = prompts()
    with qwen3.start(depth=2, max_total_tokens=112, max_model_len=100) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in wanted], greedy(30, logprobs=0)
        )
        assert llm._engine.scheduler.num_preemptions
    for output in outputs:
        tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
        expected = qwen3.logits((*output.prompt_token_ids, *tokens)).log_softmax(-1)[
            len(output.prompt_token_ids) - 1 :
        ]
        assert entries is not None
        assert [
            entry[token].logprob for entry, token in zip(entries, tokens, strict=True)
        ] == pytest.approx([float(expected[i, token]) for i, token in enumerate(tokens)], abs=NEAR)


def adjusted(
    logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
) -> torch.Tensor:
    """Apply penalties and biases to logits, as documented."""
    wanted = logits.clone()
    for token in {*prompt, *output}:
        repetition = params.repetition_penalty or 1.0
        wanted[token] = (
            wanted[token] / repetition if wanted[token] > 0 else wanted[token] * repetition
        )
    for token in set(output):
        wanted[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        wanted[token] += bias
    return wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 1.7},
        {"logit_bias": {40: 9.0, 7: -100.0}},
        {
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.2,
            "logit_bias": {40: 9.0},
        },
    ],
    ids=lambda changes: " ".join(changes),
)
@pytest.mark.parametrize(
    ("preempts", "depth"),
    [
        pytest.param(False, 1, marks=pytest.mark.release),
        pytest.param(True, 1, marks=pytest.mark.release),
        (True, 2),
    ],
)
def test_penalties_and_biases_follow_their_formulas(
    qwen3: Family, changes: dict[str, Any], preempts: bool, depth: int
) -> None:
    wanted = prompts()[1::2]
    params = greedy(30, **changes)
    with qwen3.start(depth, max_total_tokens=112 if preempts else 1024, max_model_len=100) as llm:
        plain, got = run(llm, wanted, greedy(30)), run(llm, wanted, params)
        assert bool(llm._engine.scheduler.num_preemptions) is preempts
    assert plain != got
    for prompt, tokens in zip(wanted, got, strict=True):
        logits = qwen3.logits((*prompt, *tokens))
        for i, token in enumerate(tokens):
            changed = adjusted(logits[len(prompt) - 1 + i], prompt, tokens[:i], params)
            assert changed.max() - changed[token] <= NEAR


def test_stop_token_is_the_last_token(llm: LLM) -> None:
    whole = generate_one(llm, [5, 6, 7], greedy(30))
    stop = whole.token_ids[9]
    first = whole.token_ids.index(stop)
    stopped = generate_one(llm, [5, 6, 7], greedy(30, stop_token_ids=(stop, 0)))
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    assert whole.finish_reason == "length"


def test_eos_ends_a_sequence_unless_ignored(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={EOS: 100})
    ended = generate_one(llm, [5, 6, 7], params)
    assert (ended.token_ids, ended.finish_reason) == ([EOS], "stop")
    goes_on = generate_one(llm, [5, 6, 7], params.model_copy(update={"ignore_eos": True}))
    assert (goes_on.token_ids, goes_on.finish_reason) == ([EOS] * 5, "length")


@pytest.mark.parametrize("depth", [1, 2])
def test_min_tokens_delay_stop_tokens_as_in_transformers(qwen3: Family, depth: int) -> None:
    wanted, stops, num_min = prompts(), [*range(3, 50)], 9
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=stops, min_tokens=num_min)
    # So few tokens that sequences are preempted and start again.
    with qwen3.start(depth, max_total_tokens=160) as tight:
        outputs = tight.generate([{"prompt_token_ids": prompt} for prompt in wanted], params)
    for prompt, output in zip(wanted, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) > num_min
        delay = MinNewTokensLengthLogitsProcessor(len(prompt), num_min, [*stops, EOS])
        logits = qwen3.logits((*prompt, *tokens))
        for at, token in enumerate(tokens, len(prompt)):
            known = torch.tensor([[*prompt, *tokens][:at]])
            scores = delay(known, logits[at - 1 : at].clone())[0]
            assert scores.max() - scores[token] <= NEAR


@pytest.mark.parametrize("num_prompt", [1, 60, CONTEXT - 1])
def test_default_max_tokens_fills_the_context(llm: LLM, qwen3: Family, num_prompt: int) -> None:
    prompt = (prompts()[9] * 3)[:num_prompt]
    output = generate_one(llm, prompt, SamplingParams(temperature=0, ignore_eos=True))
    assert len(output.token_ids) == CONTEXT - num_prompt
    assert output.finish_reason == "length"
    qwen3.check_greedy(prompt, output.token_ids)


def test_stop_strings_end_the_text() -> None:
    with LLM(max_total_tokens=2048) as demo:
        ask_for = "Repeat: red green blue"
        whole = demo.generate(ask_for, greedy(24))[0].outputs[0].text
        assert whole is not None
        for length in (1, 2, 5):
            stop = whole[6 : 6 + length]
            at = whole.index(stop)
            for keeps in (False, True):
                params = SamplingParams(
                    temperature=0,
                    max_tokens=24,
                    ignore_eos=True,
                    stop=(stop,),
                    include_stop_str_in_output=keeps,
                )
                stopped = demo.generate([ask_for, "other"], params)[0].outputs[0]
                assert stopped.text == whole[: at + (length if keeps else 0)]
                assert stopped.finish_reason == "stop"
        pool = demo._engine.scheduler.kv.pool
        assert pool.num_available == pool.num_pages


def test_abort_during_logprobs_does_not_affect_others(llm: LLM, qwen3: Family) -> None:
    engine = llm._engine
    submit = llm._build_submit(
        EncodedPrompt(None, np.array([5, 6, 7], np.int32)), greedy(20, logprobs=2)
    )
    engine.submit(submit)
    draft = engine.scheduler.plan()
    assert draft is not None
    engine.launch(draft)
    engine.abort([submit.request_id])
    assert not len(engine.collect().sequence_ids)
    qwen3.check_greedy([5, 6, 7], generate_one(llm, [5, 6, 7], greedy(4)).token_ids)


@pytest.mark.parametrize("changes", [{}, {"logprobs": 2}, {"presence_penalty": 1.0}], ids=str)
def test_sequence_without_finite_logits_fails_alone(qwen3: Family, changes: dict[str, Any]) -> None:
    with qwen3.start() as llm:
        weights = {slot.name: slot.target for slot in llm._engine.runner._model.weight_map()}  # type: ignore[attr-defined]
        weights["model.embed_tokens.weight"][50] = float("nan")
        good, bad = (
            llm._build_submit(EncodedPrompt(None, np.array(ids, np.int32)), greedy(8, **each))
            for ids, each in (([5, 6, 7], {}), ([5, 50, 7], changes))
        )
        tokens, finish = drive(llm, [bad, good])
        assert (tokens[bad.request_id], finish[bad.request_id]) == ([], FinishReason.ERROR)
        assert finish[good.request_id] is FinishReason.LENGTH
        qwen3.check_greedy([5, 6, 7], tokens[good.request_id])
        with pytest.raises(TokenSpeedError, match="no finite logit"):
            generate_one(llm, [5, 50, 7], greedy(8, **changes))
        pool = llm._engine.scheduler.kv.pool
        assert pool.num_available == pool.num_pages
