"""Control tokens in texts of users stay text; other texts are encoded as transformers does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from tokenspeed_core.errors import BadRequestError
from tokenspeed_core.text import ChatTemplate
from tokenspeed_core.text.tokenizer import Tokenizer
from tokenspeed_core.text.user_text import BREAK, MAX_BREAKS, UserTextGuard, cut_at_breaks

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|end|>", "<s>", "[INST]", "<bos>"]
PLAIN = ["<\uff5cUser\uff5c>", "<think>", "</think>", "<tool>", "</tool>"]  # added, not special
TEMPLATE = (
    "<bos>{% for m in messages %}<|im_start|>{{ m.role }}\n<\uff5cUser\uff5c>{{ m.content | trim }}"
    "{% if m.name is defined %}{{ m.name }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tool>{{ tools | tojson }}</tool>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
TEXTS = st.text("ab <>|_/[]é🙂\n{}\"'\\", max_size=20)
PIECES = st.lists(
    st.sampled_from([*SPECIAL, *PLAIN, "<|im_", "end|>", "|>", "<", " ", "hi\n", "<|IM_END|>"])
)
MESSAGES = st.lists(st.tuples(st.sampled_from(["user", "system", "assistant"]), TEXTS), min_size=1)


def make_backend(*, lowers: bool = False) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with control tokens; with `lowers`, they match any case."""
    backend = tokenizers.Tokenizer(models.BPE())
    if lowers:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user assistant system hello <|im_end|> hi\n" * 3], trainer)
    backend.add_special_tokens(
        [AddedToken(each, special=True, normalized=lowers) for each in SPECIAL]
    )
    backend.add_tokens([AddedToken(each, special=False, normalized=False) for each in PLAIN])
    return backend


BACKEND = make_backend()
TOKENIZER = Tokenizer(BACKEND, {})
TEMPLATES = ChatTemplate(TEMPLATE, {})
GUARD = TEMPLATES.guard(TOKENIZER)
CONTROL = {BACKEND.token_to_id(each) for each in [*SPECIAL, PLAIN[0]]}


def render(messages: Any, tools: Any = None) -> list[int]:
    """Return the ids of a chat, with the texts of users protected."""
    text = TEMPLATES.render(GUARD.protect(messages), GUARD.protect(tools))
    return TOKENIZER.encode_rendered(text).tolist()


def num_control(ids: list[int]) -> int:
    return sum(i in CONTROL for i in ids)


@settings(max_examples=60, deadline=None)
@given(MESSAGES)
def test_ordinary_texts_are_encoded_as_transformers_does(
    given_texts: list[tuple[str, str]],
) -> None:
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=BACKEND, chat_template=TEMPLATE)
    messages = [
        {"role": role, "content": text} for role, text in given_texts if GUARD.protect(text) is text
    ]
    if messages:
        expected = oracle.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert render(messages) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(PIECES, PIECES), min_size=1, max_size=3), PIECES)
def test_no_text_adds_a_control_token(
    texts: list[tuple[list[str], list[str]]], tool: list[str]
) -> None:
    messages = [
        {"role": "user", "content": "".join(content), "name": "".join(name)}
        for content, name in texts
    ]
    harmless = [{"role": "user", "content": "x", "name": "y"} for _ in messages]
    tools = [{"name": "".join(tool), "".join(tool): [1]}]
    assert num_control(render(messages, tools)) == num_control(render(harmless, [{"a": 1}]))


@given(PIECES)
def test_text_with_control_tokens_keeps_its_characters(pieces: list[str]) -> None:
    text = "".join(pieces)
    protected = GUARD.protect(text)
    assert protected.replace(BREAK, "") == text
    ids = TOKENIZER.encode_rendered(protected).tolist()
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_values_without_control_tokens_are_not_copied() -> None:
    value = {"a": ["b", {"c": 1, "d": None}], "<think>": "</think> <tool>"}
    assert GUARD.protect(value) is value
    assert GUARD.protect({"a": ["<s>"]}) == {"a": [f"<{BREAK}s>"]}
    assert GUARD.protect({"<s>": 1}) == {f"<{BREAK}s>": 1}


def test_escaped_breaks_are_cut_too() -> None:
    text = json.dumps(GUARD.protect("a<|im_end|>b"))
    assert "".join(cut_at_breaks(text)) == '"a<|im_end|>b"'


def test_number_of_control_tokens_in_messages_is_limited() -> None:
    half = "<|im_end|>" * (MAX_BREAKS // 2)
    GUARD.protect([half, {"a": half}])
    for value in ([half, half + "<s>"], {half: half, "a": "<s>"}, "<s>" * 1_000_000):
        with pytest.raises(BadRequestError):
            GUARD.protect(value)


def test_overlapping_tokens_are_all_broken() -> None:
    guard = UserTextGuard(["ab", "bc", "x"])
    assert guard.protect("abcx") == f"a{BREAK}b{BREAK}cx"


@pytest.mark.parametrize("written", ["<|im_end|>", "<|IM_END|>", "<|Im_End|>"])
def test_tokens_that_match_after_normalization_are_broken(written: str) -> None:
    backend = make_backend(lowers=True)
    tokenizer = Tokenizer(backend, {})
    guard = ChatTemplate(TEMPLATE, {}).guard(tokenizer)
    end = backend.token_to_id("<|im_end|>")
    assert end in tokenizer.encode(written, add_special_tokens=False)
    assert end not in tokenizer.encode_rendered(guard.protect(written))


def test_post_processor_adds_its_tokens_once() -> None:
    backend = make_backend()
    bos = backend.token_to_id("<bos>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", pair=None, special_tokens=[("<bos>", bos)]
    )
    tokenizer = Tokenizer(backend, {})
    plain = tokenizer.encode_rendered("a", add_special_tokens=True).tolist()
    broken = tokenizer.encode_rendered(f"a{BREAK}b", add_special_tokens=True).tolist()
    assert plain[0] == broken[0] == bos
    assert broken.count(bos) == 1
