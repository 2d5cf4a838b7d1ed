"""A DFlash drafter (arXiv:2602.06036): Qwen3 layers that draft a block of tokens in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.drafters.dflash_config import DFlashConfig
from tokenspeed_models.layers.attention import Attention
from tokenspeed_models.layers.causal_lm import CausalLM
from tokenspeed_models.layers.decoder import DecoderLayer
from tokenspeed_models.layers.linear import Linear, Projection
from tokenspeed_models.layers.mlp import MLP
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.layers.qk_norm import HeadNorm
from tokenspeed_models.layers.rotary import rotary_table
from tokenspeed_models.sharding import Replicated, ShardingSpec, compile_sharding
from tokenspeed_models.weights import WeightMap


class DFlashDrafter:
    """A DFlash drafter: implements the core's `BlockDraftModel` with the target's embedding and output head.

    The hidden states of several layers of the target are combined to one context vector per token. Each layer projects
    these vectors to keys and values, with the projections that it uses for the tokens of a block.
    """

    def __init__(self, config: Mapping[str, Any], build: BuildContext, target: CausalLM) -> None:
        """`config` has the `DFlashConfig` under "dflash". Raises ValueError for a drafter of another hidden size."""
        c: DFlashConfig = config["dflash"]
        decoder, hidden = c.decoder, c.decoder.hidden_size
        size = target.norm.weight.shape[0]
        if size != hidden:
            raise ValueError(
                f"the DFlash drafter has hidden size {hidden}, and the target has {size}"
            )
        self._target, self._groups = target, build.group
        self._combine = Linear(build, len(c.layers) * hidden, (Projection("fc", hidden, None),))
        self._context_norm = RMSNorm(build, hidden, decoder.norm_eps)
        cos_sin = rotary_table(decoder.rope, build.device, build.max_model_len)
        attentions, self._layers = [], []
        for layer in build.each_layer(decoder.num_layers):
            attention = Attention(
                build,
                layer=layer,
                hidden_size=hidden,
                num_heads=decoder.num_heads,
                num_kv_heads=decoder.num_kv_heads,
                head_size=decoder.head_size,
                cos_sin=cos_sin,
                qkv_bias=decoder.qkv_bias,
                out_bias=decoder.out_bias,
                qk_norm=HeadNorm(build, decoder.head_size, decoder.norm_eps),
            )
            mlp = MLP(build, hidden, decoder.intermediate_size, bias=decoder.mlp_bias)
            attentions.append(attention)
            self._layers.append(DecoderLayer(build, hidden, decoder.norm_eps, attention, mlp))
        self._attentions = tuple(attentions)
        self._norm = RMSNorm(build, hidden, decoder.norm_eps)
        compile_sharding(build, self.sharding())

    def write_context(self, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Write the cache entries of positions int64 [T], from the target's hidden states [T, layers * hidden].

        The queries that the GEMM of a layer computes as well are not used.
        """
        context = self._context_norm(self._combine(hidden))
        for attention in self._attentions:
            attention.write(attention.qkv(context), positions)

    def forward_block(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return hidden states [T, hidden] of the tokens of blocks, int64 [T], and write their cache entries."""
        x, residual = self._target.embed(token_ids), None
        for layer in self._layers:
            x, residual = layer.forward(x, residual, positions)
        assert residual is not None, "a drafter has layers"
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, vocab] of the target's output head for rows [R, hidden]."""
        return self._target.logits(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a drafter's weights. Raises ValueError naming each that is missing, unexpected or misshapen."""
        self.weight_map().load(weights)

    def weight_map(self) -> WeightMap:
        """Return the map from published names to parameters."""
        slots = [
            *self._combine.slots(""),
            *self._context_norm.slots("hidden_norm"),
            *self._norm.slots("norm"),
        ]
        for index, layer in enumerate(self._layers):
            slots.extend(layer.slots(f"layers.{index}."))
        return WeightMap(slots, [], groups=self._groups)

    def sharding(self) -> Iterator[ShardingSpec]:
        """List the sharding specs of all modules in order of computation."""
        whole = Replicated()
        yield ShardingSpec("fc", whole, whole, self._norm.weight.shape[0])
        yield from self._context_norm.sharding("hidden_norm")
        yield from self._target.embedding_sharding()
        for index, layer in enumerate(self._layers):
            yield from layer.sharding(f"layers.{index}.")
        yield from self._norm.sharding("norm")
        yield from self._target.head_sharding()
