"""Any model as the draft model of another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tokenspeed_core.api import BuildContext, Model, ModelSpec

if TYPE_CHECKING:
    import torch


class SmallerModel:
    """Implements the core's `DraftModel` with a separate model, which reads tokens only."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext, target: Model) -> None:
        """`config` has the `spec` of the draft model's family, its `config` (the checkpoint's), and its `max_model_len`."""
        spec: ModelSpec = config["spec"]
        self._model = spec.make(config["config"], build)
        self._last_position = config["max_model_len"] - 1
        self._is_shorter = config["max_model_len"] < build.max_model_len

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights of the draft checkpoint. Raises ValueError as the model does."""
        self._model.load_weights(weights)

    def weight_map(self) -> Any:
        """Return the map from checkpoint names to the model's parameters, if the model has one."""
        return self._model.weight_map()  # type: ignore[attr-defined]

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """Not called: the model reads no hidden states."""
        raise AssertionError("this draft model reads tokens only")

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the model's hidden states.

        Positions that the model does not have count as its last one. Draft tokens there are worse, but allowed.
        """
        if self._is_shorter:
            positions = positions.clamp(max=self._last_position)
        return self._model.forward(token_ids, positions, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the model's logits."""
        return self._model.logits(hidden)
