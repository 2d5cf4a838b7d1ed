"""The mixture of experts of a decoder, as configurations describe it. Imports no tensor library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How a router chooses the experts of a token and weighs them: the axes of the op `moe_route`.

    Scores are the softmax or sigmoid of the router's logits; a `score` of "top_k_softmax" ranks the logits and takes
    the softmax of the chosen ones. With `has_bias` a bias is added to the scores for the choice, but not for the
    weights. Experts are in `num_groups` groups, of which a token uses the `top_groups` with the highest `group_score`:
    "max", or "top_2_sum", the sum of the two largest. Raises ValueError if a token cannot have `top_k` experts.
    """

    num_experts: int
    top_k: int
    score: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    has_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ValueError(
                f"config.json: a token cannot use {self.top_groups} of {self.num_groups} groups of {self.num_experts} "
                "experts. Groups must be equal in size, and a token cannot use more groups than there are."
            )
        num_allowed = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > num_allowed:
            raise ValueError(
                f"config.json: num_experts_per_tok is {self.top_k}, expected at most {num_allowed} (the "
                "number of experts that a token may use)"
            )


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixture of experts of a decoder; `layers` are the layers that have one.

    `intermediate_size` is that of one expert. `shared_size` is that of the shared experts together, 0 without any;
    with `is_shared_gated` their output is multiplied by the sigmoid of a linear layer. With `is_router_wide` the
    router's GEMM is computed in float32.
    """

    routing: RoutingConfig
    intermediate_size: int
    layers: frozenset[int]
    shared_size: int = 0
    is_shared_gated: bool = False
    has_router_bias: bool = False
    is_router_wide: bool = False
