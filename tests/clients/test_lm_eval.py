"""lm-eval: log-likelihoods by completions, compared with transformers, and texts by chats."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from running_server import CHECKPOINT, PYTHON, Server, run

CLIENT = "lm_eval"
PAIRS = [
    ("What is 23 + 45?", " 68"),
    ("What is 23 + 45?", " 69 or so"),
    ("The capital of France is", " Paris"),
    ("one two three", " four five six seven"),
]
TEXTS = ["one two three four five", "Maria lives in Lisbon."]
# Scores texts with transformers, in the environment of this repository: token ids of contexts and of continuations
# come in as JSON.
ORACLE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
results = []
for context, continuation in json.loads(sys.argv[2]):
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        scores = model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
    target = torch.tensor(continuation)
    total = scores.gather(1, target[:, None]).sum().item()
    results.append([total, bool((scores.argmax(-1) == target).all())])
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server with numbers exact enough to compare."""
    with run(tmp_path_factory.mktemp("float32"), "--dtype", "float32") as started:
        yield started


@pytest.fixture
def completions(exact: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OPENAI_API_KEY", exact.key)
    return LocalCompletionsAPI(
        base_url=f"{exact.v1}/completions",
        model="demo",
        tokenizer=str(CHECKPOINT),
        max_length=512,
        num_concurrent=1,
        batch_size=2,
    )


@pytest.fixture
def chats(exact: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OPENAI_API_KEY", exact.key)
    return LocalChatCompletion(
        base_url=f"{exact.v1}/chat/completions", model="demo", num_concurrent=1, max_length=512
    )


def requests(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=index)
        for index, each in enumerate(arguments)
    ]


def expected(pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Return the result of transformers: the log-likelihood, and whether greedy decoding gives the continuation."""
    done = subprocess.run(
        [str(PYTHON), "-P", "-c", ORACLE, str(CHECKPOINT), json.dumps(pairs)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    return [(total, is_greedy) for total, is_greedy in json.loads(done.stdout)]


def test_loglikelihood_equals_transformers(completions: Any) -> None:
    found = completions.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    encoded = [completions._encode_pair(*pair) for pair in PAIRS]
    for (score, is_greedy), (total, greedy) in zip(found, expected(encoded), strict=True):
        assert math.isclose(score, total, abs_tol=2e-3)
        assert is_greedy == greedy


def test_rolling_loglikelihood_equals_transformers(completions: Any) -> None:
    asked = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    found = completions.loglikelihood_rolling(asked, disable_tqdm=True)
    ids = [completions.tok_encode(text) for text in TEXTS]
    pairs = [([completions.prefix_token_id], each) for each in ids]
    for score, (total, _) in zip(found, expected(pairs), strict=True):
        assert math.isclose(score, total, abs_tol=2e-3)


def test_concurrent_requests_give_the_same(completions: Any, exact: Server) -> None:
    parallel: Any = LocalCompletionsAPI(
        base_url=f"{exact.v1}/completions",
        model="demo",
        tokenizer=str(CHECKPOINT),
        max_length=512,
        num_concurrent=4,
    )
    asked = requests("loglikelihood", PAIRS)
    one = completions.loglikelihood(asked, disable_tqdm=True)
    other = parallel.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    for (score, is_greedy), (again, greedy) in zip(one, other, strict=True):
        assert math.isclose(score, again, abs_tol=1e-3)
        assert is_greedy == greedy


def test_completions_generate_until_a_stop_string(completions: Any) -> None:
    options = {"until": ["five"], "max_gen_toks": 16, "temperature": 0}
    asked = requests("generate_until", [("one two three", options)])
    (text,) = completions.generate_until(asked, disable_tqdm=True)
    assert isinstance(text, str)
    assert "five" not in text


def test_chats_generate_answers(chats: Any) -> None:
    message = json.dumps([{"role": "user", "content": "What is 23 + 45?"}])
    options = {"until": ["%%"], "max_gen_toks": 300, "temperature": 0}
    asked = requests("generate_until", [(JsonChatStr(message), options)])
    (text,) = chats.generate_until(asked, disable_tqdm=True)
    assert "68" in text
