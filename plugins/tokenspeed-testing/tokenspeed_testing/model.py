"""Conformance of a model family, as a class to inherit: a small configuration with random weights.

Subclasses set `spec = MINE` and `config = {"architectures": ["MineForCausalLM"], "hidden_size": 64,
...}`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from tokenspeed_core.api.models import ModelInfo, ModelSpec
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.targets import load_target
from tokenspeed_core.worker.local import LocalRunner, build
from tokenspeed_testing.installed import installed_catalog
from tokenspeed_testing.plans import PlanMaker

BLOCK_SIZE, MAX_TOKENS, NUM_NEW = 4, 96, 6


class ModelConformance:
    """Checks of a family. Subclasses set `spec` and `config`; the family must be installed."""

    spec: ClassVar[ModelSpec]
    config: ClassVar[Mapping[str, Any]]

    def test_description_matches_the_architecture(self) -> None:
        """`describe` needs only config.json."""
        info = self._describe(self.config)
        assert isinstance(info, ModelInfo)
        assert info.architecture == self.spec.architecture
        assert info.cache_groups, "a family declares its cache groups"

    def test_missing_keys_are_named(self) -> None:
        """`describe` raises ValueError naming a missing key."""
        needed = [key for key in self.config if not self._is_described_without(key)]
        assert needed, "no key of the configuration is needed"

    def test_chunks_and_other_rows_do_not_change_tokens(self) -> None:
        """Greedy tokens of a prompt are the same whole and in chunks, alone and among others."""
        prompt, other = list(range(3, 20)), [7, 7, 5]
        alone = self._generate({"a": prompt}, [{"a": len(prompt)}])
        steps: list[dict[str, int]] = [{"a": 5}, {"a": 7, "b": 3}, {"a": 5}]
        if self._describe(self.config).is_bidirectional:  # its prompts are not cut
            steps = [{"b": len(other), "a": len(prompt)}]
        cut = self._generate({"a": prompt, "b": other}, steps)
        assert alone["a"] == cut["a"]

    def _generate(
        self, prompts: Mapping[str, Sequence[int]], steps: Sequence[Mapping[str, int]]
    ) -> dict[str, list[int]]:
        runner = self._runner()
        maker = PlanMaker(runner.block_size, runner.layout.blocks_per_page)
        for slot, (name, tokens) in enumerate(prompts.items()):
            maker.add(name, tokens, slot)
        for chunks in steps:
            maker.step(runner, chunks=chunks)
        for _ in range(NUM_NEW):
            maker.step(runner, decodes=list(prompts))
        return {name: sequence.output[:NUM_NEW] for name, sequence in maker.sequences.items()}

    def _runner(self) -> LocalRunner:
        catalog = installed_catalog()
        with tempfile.TemporaryDirectory(prefix="tokenspeed-") as folder:
            Path(folder, "config.json").write_text(json.dumps(dict(self.config)), encoding="utf-8")
            asked = Config(
                model=folder,
                dtype="float32",
                device="cpu",
                load_format="dummy",
                max_num_seqs=4,
                chunked_prefill_size=MAX_TOKENS,
                block_size=BLOCK_SIZE,
                max_total_tokens=1024,
            )
            resolved = resolve(asked, catalog)
        # Independent of the family's own maximum length.
        limits = replace(resolved.limits, max_model_len=MAX_TOKENS)
        return build(replace(resolved, limits=limits), catalog, lambda what, done, total: None)

    def _describe(self, config: Mapping[str, Any]) -> ModelInfo:
        info: ModelInfo = load_target(self.spec.describe)(config)
        return info

    def _is_described_without(self, key: str) -> bool:
        message = ""
        try:
            self._describe({name: value for name, value in self.config.items() if name != key})
        except ValueError as error:
            message = str(error) or "nothing"
        assert not message or key in message, f"without {key} it says only: {message}"
        return not message
