"""Comparison of a model family with Hugging Face transformers, as a class to inherit.

A tiny checkpoint with random weights is written with transformers and served by an engine. Subclasses set `spec`, and
`config` to a small config.json of the family; without one, the default configuration of transformers is shrunk.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api.models import ModelInfo, ModelSpec
from tokenspeed_core.targets import load_target
from tokenspeed_testing.cases import NotRun

TOLERANCE = 1e-3  # of log-probabilities: sums in another order give about 1e-5, a wrong window 1e-1
NUM_TOP = 20
LENGTHS = (1, 9, 33, 50)
NUM_NEW = 24
WINDOW = 9  # shorter than most prompts
MAX_LENGTH = 128
# Sizes of a tiny model. Only keys that a configuration has are set.
SMALL: Mapping[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": MAX_LENGTH,
    "sliding_window": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "whole prompts": {},
    "chunks of 5 tokens, 4 sequences at once": {"chunked_prefill_size": 5, "max_num_seqs": 4},
    "preemptions": {"max_total_tokens": 112, "chunked_prefill_size": 16},
}


@dataclass(frozen=True, slots=True)
class Reference:
    """A checkpoint on disk and the model of transformers that wrote it."""

    folder: Path
    model: Any
    vocab_size: int
    is_bidirectional: bool
    outputs: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = field(
        default_factory=dict
    )

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits [T, vocab] of a sequence."""
        with torch.inference_mode():
            result: torch.Tensor = self.model(torch.tensor([list(token_ids)])).logits[0]
        return result

    def output_logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits [T, vocab] for each token of an output, given the tokens before it.

        They are kept: right outputs are the same in every run.
        """
        key = (tuple(prompt), tuple(tokens))
        if key not in self.outputs:
            self.outputs[key] = self._output_logits(prompt, tokens)
        return self.outputs[key]

    def _output_logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        if not self.is_bidirectional:
            return self.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        # A longer sequence would show the prompt the output.
        found = self.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=len(tokens),
            eos_token_id=None,
            prefix_allowed_tokens_fn=lambda row, ids: [tokens[len(ids) - len(prompt)]],
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.cat(found.logits)

    def prompts(self) -> list[list[int]]:
        """Return random prompts of several lengths; half of them begin alike."""
        random = np.random.default_rng(3)
        shared = random.integers(3, self.vocab_size, max(LENGTHS)).tolist()
        others = [random.integers(3, self.vocab_size, length).tolist() for length in LENGTHS]
        return [*(shared[:length] for length in LENGTHS), *others]


class TransformersConformance:
    """Checks of a family against transformers. Subclasses set `spec`; the family must be installed."""

    spec: ClassVar[ModelSpec]
    config: ClassVar[Mapping[str, Any] | None] = None

    def test_number_of_parameters_equals_transformers(self) -> None:
        """`describe` returns the number of parameters of the transformers model. Tied parameters count once."""
        model, config = self._model
        info: ModelInfo = load_target(self.spec.describe)(config)
        expected = sum(parameter.numel() for parameter in model.parameters())
        assert info.num_parameters == expected, (
            f"`describe` counts {info.num_parameters} parameters, transformers {expected}"
        )

    def test_logits_equal_transformers(self) -> None:
        """The log-probabilities of prompt tokens, and the largest ones, equal those of transformers.

        If prompt tokens see later ones, those of the first output token are compared.
        """
        info: ModelInfo = load_target(self.spec.describe)(self._model[1])
        with self._reference() as reference, _start(reference, chunked_prefill_size=16) as llm:
            top = {"logprobs" if info.is_bidirectional else "prompt_logprobs": NUM_TOP}
            params = SamplingParams(**top, temperature=0, max_tokens=1)
            prompts = reference.prompts()
            for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params):
                ids, entries = output.prompt_token_ids, (output.prompt_logprobs or [])[1:]
                expected = reference.logits(ids).log_softmax(dim=-1)
                if info.is_bidirectional:
                    entries, expected = [*(output.outputs[0].logprobs or [])], expected[-1:]
                for position, entry in enumerate(entries):
                    assert entry is not None
                    row = expected[position]
                    assert torch.topk(row, NUM_TOP).values[-1] <= TOLERANCE + max(
                        row[token].item() for token in entry
                    )
                    for token, found in entry.items():
                        difference = abs(found.logprob - row[token].item())
                        assert difference <= TOLERANCE, (
                            f"the log-probability of token {token} after {position + 1} of {len(ids)} prompt tokens "
                            f"is {found.logprob:.4f}, in transformers {row[token].item():.4f}"
                        )

    def test_greedy_tokens_equal_transformers(self) -> None:
        """Greedy tokens equal those of transformers: with chunks, prefix hits and preemptions."""
        with self._reference() as reference:
            for name, settings in SETTINGS.items():
                with _start(reference, **settings) as llm:
                    for attempt in ("", ", with prefix hits"):
                        _compare_tokens(reference, llm, f"{name}{attempt}")

    @contextmanager
    def _reference(self) -> Iterator[Reference]:
        torch.manual_seed(11)
        model, config = self._model
        _randomize(model)
        with tempfile.TemporaryDirectory(prefix="tokenspeed-") as folder, _one_thread():
            model.save_pretrained(folder)
            if self.config is not None:
                # The family reads the keys of its own example.
                Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            info: ModelInfo = load_target(self.spec.describe)(config)
            yield Reference(Path(folder), model, config["vocab_size"], info.is_bidirectional)

    @cached_property
    def _model(self) -> tuple[Any, dict[str, Any]]:
        """Return an uninitialized model of transformers and its config.json. Raises NotRun."""
        import transformers

        architecture = self.spec.architecture
        kind = getattr(transformers, architecture, None)
        if kind is None or not architecture.endswith("ForCausalLM"):
            raise NotRun(1, f"a causal language model {architecture} in transformers")
        if self.config is None:
            settings = kind.config_class(**_shrunk(kind.config_class()))
            return kind(settings).eval(), settings.to_dict()
        # A default padding token may be beyond the vocabulary of a tiny model.
        config = {"pad_token_id": None, **self.config, "dtype": "float32"}
        if (config.get("sliding_window") or 0) > WINDOW:
            config["sliding_window"] = WINDOW
        return kind(kind.config_class(**config)).eval(), config


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: for tiny tensors, others only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _shrunk(default: Any) -> dict[str, Any]:
    """Return the changes that make a default configuration tiny, with a layer of each type."""
    changes = {
        key: value for key, value in SMALL.items() if getattr(default, key, None) is not None
    }
    types = getattr(default, "layer_types", None) or [""] * 3
    changes["num_hidden_layers"] = max(types.index(each) for each in set(types)) + 1
    if len(set(types)) == 1:
        changes["num_hidden_layers"] = 3
    heads, kv_heads = default.num_attention_heads, getattr(default, "num_key_value_heads", None)
    if kv_heads is not None:
        changes["num_key_value_heads"] = 4 if kv_heads == heads else 2
    return changes


def _randomize(model: Any) -> None:
    """Give all weights values that matter: a norm of one or a bias of zero would hide a fault."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5)
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.uniform_(-0.2, 0.2)


def _start(reference: Reference, **settings: Any) -> LLM:
    defaults = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "device": "cpu",
        "max_total_tokens": 1024,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_model_len": max(LENGTHS) + NUM_NEW,
    }
    return LLM(str(reference.folder), **{**defaults, **settings})


def _compare_tokens(reference: Reference, llm: LLM, case: str) -> None:
    """Raise AssertionError if transformers finds another token more probable."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    prompts = reference.prompts()
    for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params):
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        logits = reference.output_logits(prompt, tokens)
        for number, (token, row) in enumerate(zip(tokens, logits, strict=True), 1):
            assert row.max() - row[token] <= TOLERANCE, (
                f"{case}: generated token {number} after a prompt of {len(prompt)} tokens is "
                f"{token}, in transformers {int(row.argmax())}"
            )
