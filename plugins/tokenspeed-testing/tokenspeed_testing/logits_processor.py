"""Conformance of a logits processor, as a class to inherit.

Subclasses set `spec = MINE`. The checks use the parameters of the spec's `example`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from tokenspeed_core.api.logits_processors import (
    LogitsProcessor,
    LogitsProcessorContext,
    LogitsProcessorSpec,
    LogitsRows,
)

VOCAB_SIZE = 64
NUM_SLOTS = 6
NUM_STEPS = 8
_IMPORTS = "import sys; import {module}; sys.exit('torch' in sys.modules)"


class LogitsProcessorConformance:
    """Checks of a logits processor on the CPU."""

    spec: ClassVar[LogitsProcessorSpec]

    def test_check_accepts_the_example(self) -> None:
        """The example's parameters are valid."""
        self.spec.check_params(self.spec.example)

    def test_check_refuses_unknown_parameters(self) -> None:
        """A parameter that does not exist raises ValueError, so that no typo is ignored."""
        try:
            self.spec.check_params({**self.spec.example, "no_such_parameter": 1})
        except ValueError:
            return
        raise AssertionError("check accepts the unknown parameter 'no_such_parameter'")

    def test_check_imports_no_tensor_library(self) -> None:
        """API processes import the module of `check`, without torch."""
        module = self.spec.check.partition(":")[0]
        done = subprocess.run([sys.executable, "-c", _IMPORTS.format(module=module)], check=False)
        assert done.returncode == 0, f"importing {module} imports torch, or fails"

    def test_logits_stay_usable(self) -> None:
        """No row contains NaN or plus infinity, and each keeps a finite logit. Logits change in place."""
        processor = self._make()
        history = _tokens(5)
        processor.begin(2, self.spec.example, history, 5)
        last = history
        for step in range(NUM_STEPS):
            logits = _logits(1, step)
            processor.apply(logits, _rows([2], [int(last[-1])]))
            assert not logits.isnan().any() and not (logits == float("inf")).any(), f"step {step}"
            assert logits.isfinite().any(), f"step {step}: all tokens are forbidden"
            last = np.array([int(logits.argmax())], np.int32)

    def test_rows_do_not_depend_on_each_other(self) -> None:
        """A row gets the same logits alone and next to others, in any order of the rows."""
        together = self._run([4, 1, 3], 3)
        for slot in (4, 1, 3):
            alone = self._run([slot], 3)
            assert torch.equal(alone[slot], together[slot]), f"slot {slot} depends on other rows"

    def test_slot_forgets_its_last_sequence(self) -> None:
        """A slot that had a sequence before gives the same logits as a new one."""
        processor = self._make()
        for sequence in (3, 0):
            processor.begin(1, self.spec.example, _tokens(6, sequence), 6)
            used = _logits(1, sequence)
            processor.apply(used, _rows([1], [int(_tokens(6, sequence)[-1])]))
        new = self._make()
        new.begin(1, self.spec.example, _tokens(6, 0), 6)
        expected = _logits(1, 0)
        new.apply(expected, _rows([1], [int(_tokens(6, 0)[-1])]))
        assert torch.equal(used, expected), "the slot's earlier sequence changes the logits"

    def test_preempted_sequence_continues(self) -> None:
        """A sequence that begins with generated tokens gets the same logits as one that was never preempted."""
        prompt, output = _tokens(4), _tokens(NUM_STEPS, 1)
        going = self._make()
        going.begin(0, self.spec.example, prompt, len(prompt))
        for position in range(len(output)):
            known = np.concatenate((prompt, output[:position]))
            logits = _logits(1, position)
            going.apply(logits, _rows([0], [int(known[-1])]))
            resumed = self._make()
            resumed.begin(0, self.spec.example, known, len(prompt))
            expected = _logits(1, position)
            resumed.apply(expected, _rows([0], [int(known[-1])]))
            assert torch.equal(logits, expected), f"after {position} generated tokens"

    def _make(self) -> LogitsProcessor:
        return self.spec.factory()(LogitsProcessorContext(VOCAB_SIZE, NUM_SLOTS, "cpu"))

    def _run(self, slots: Sequence[int], num_steps: int) -> dict[int, torch.Tensor]:
        """Return the logits of each slot after some steps. A slot's tokens depend on the slot only."""
        processor = self._make()
        for slot in slots:
            processor.begin(slot, self.spec.example, _tokens(5, slot), 5)
        logits = torch.zeros(0, VOCAB_SIZE)
        for step in range(num_steps):
            last = [int(_tokens(5 + step, slot)[-1]) for slot in slots]
            logits = torch.cat([_logits(1, 100 * slot + step) for slot in slots])
            processor.apply(logits, _rows(slots, last))
        return dict(zip(slots, logits, strict=True))


def _tokens(num: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, 32, dtype=np.int32)[:num]


def _logits(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def _rows(slots: Sequence[int], last_tokens: Sequence[int]) -> LogitsRows:
    return LogitsRows(list(slots), torch.tensor(last_tokens, dtype=torch.int64))
