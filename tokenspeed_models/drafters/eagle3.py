"""An EAGLE-3 head (arXiv:2503.01840): one decoder layer that drafts from the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.drafters.eagle3_config import Eagle3Config
from tokenspeed_models.layers.attention import Attention
from tokenspeed_models.layers.causal_lm import CausalLM
from tokenspeed_models.layers.decoder import Blocks
from tokenspeed_models.layers.embedding import OutputHead
from tokenspeed_models.layers.linear import Linear, Projection
from tokenspeed_models.layers.mlp import MLP
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.layers.rotary import rotary_table
from tokenspeed_models.sharding import Replicated, ShardingSpec, bind_output, compile_sharding
from tokenspeed_models.weights import WeightMap, WeightSlot, take_shards

_EMBEDDING = "embed_tokens.weight"
_LAYER = "layers.0."


class Eagle3Head:
    """An EAGLE-3 head: implements the core's `DraftModel` with one layer, an output head, and the target's embedding.

    The input of the layer is the normalized embedding of a token, joined with the normalized hidden state before it. The
    residual stream starts with that hidden state. For the first draft token, the hidden states combine those of several
    layers of the target; for further ones, they are the residual stream after the layer. The output head may cover only
    a part of the target's vocabulary.
    """

    def __init__(self, config: Mapping[str, Any], build: BuildContext, target: CausalLM) -> None:
        """`config` has the `Eagle3Config` under "eagle3". Raises ValueError for a head of another hidden size."""
        c: Eagle3Config = config["eagle3"]
        decoder, hidden = c.decoder, c.decoder.hidden_size
        size = target.norm.weight.shape[0]
        if size != hidden:
            raise ValueError(
                f"the EAGLE-3 head has hidden size {hidden}, but the target has {size}"
            )
        self._target, self._groups = target, build.group
        self._vocab_size, self._norm_before_residual = decoder.vocab_size, c.norm_before_residual
        self._combine = Linear(build, len(c.layers) * hidden, (Projection("fc", hidden, None),))
        self._embedding_norm = RMSNorm(build, hidden, decoder.norm_eps)
        self._hidden_norm = RMSNorm(build, hidden, decoder.norm_eps)
        (self._attention,) = [
            Attention(
                build,
                layer=layer,
                hidden_size=hidden,
                input_size=2 * hidden,
                num_heads=decoder.num_heads,
                num_kv_heads=decoder.num_kv_heads,
                head_size=decoder.head_size,
                cos_sin=rotary_table(decoder.rope, build.device, build.max_model_len),
                qkv_bias=decoder.qkv_bias,
                out_bias=decoder.out_bias,
                has_norm=False,
            )
            for layer in build.each_layer(1)
        ]
        self._mlp_norm = RMSNorm(build, hidden, decoder.norm_eps)
        self._mlp = MLP(build, hidden, decoder.intermediate_size, bias=decoder.mlp_bias)
        self._blocks = Blocks(self._attention, self._mlp)
        self._norm = RMSNorm(build, hidden, decoder.norm_eps)
        self._head = OutputHead(build, c.draft_vocab_size, hidden, None)
        self._run_head: Callable[[torch.Tensor], torch.Tensor] = self._head
        # The target's id of each draft id.
        self._token_ids = torch.arange(c.draft_vocab_size, device=build.device)
        self._has_all_tokens = c.draft_vocab_size == decoder.vocab_size
        compile_sharding(build, self.sharding())

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """Combine the target's hidden states [T, layers * hidden] to [T, hidden]."""
        return self._combine(hidden)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the residual stream [R, hidden] after the layer, of `wanted`.

        token_ids [T] follow the positions [T] of hidden [T, hidden], which may be overwritten.
        """
        assert hidden is not None, "EAGLE-3 heads read hidden states"
        embedded = self._embedding_norm(self._target.embed(token_ids))
        normed = self._hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        both = torch.cat((embedded, normed), dim=-1)
        x, _ = self._blocks.attention(None, both, None, positions, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        x, residual = self._blocks.mlp(self._mlp_norm, x, residual)
        return residual.add_(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, vocab] of rows [R, hidden], -inf for tokens that the head does not know."""
        logits = self._run_head(self._norm(hidden))
        if self._has_all_tokens:
            return logits
        every = logits.new_full((logits.shape[0], self._vocab_size), -torch.inf)
        return every.index_copy_(1, self._token_ids, logits)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a head's weights, named in one of the published ways.

        Raises ValueError naming each weight that is missing, unexpected or misshapen; for a wrong map of the
        vocabulary; and for an embedding that differs from the target's.
        """
        self.weight_map().load(self._own(weights))

    def _own(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights under one name each, without copies of the target's."""
        for published, tensor in weights:
            name = published.removeprefix("model.").replace("midlayer.", _LAYER)
            if name == _EMBEDDING:
                self._check_embedding(tensor)
            elif name != "t2d":  # the inverse of d2t
                yield name, tensor

    def _read_token_ids(self, distances: torch.Tensor) -> None:
        """Read the distance of each draft id from its id in the target's vocabulary."""
        num = len(self._token_ids)
        ids = distances.cpu() + torch.arange(num)
        if len(set(ids.tolist())) < num or int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            raise ValueError(
                f"weight d2t does not map to {num} different tokens of a vocabulary of {self._vocab_size}"
            )
        self._token_ids.copy_(ids)

    def _check_embedding(self, tensor: torch.Tensor) -> None:
        """Raise ValueError if a head has an embedding other than a copy of the target's."""
        (slot,) = self._target.embedding.slots("")
        own = slot.target
        part = take_shards(slot.shard, tensor, self._groups).to(own.device, own.dtype)
        if part.shape != own.shape or not torch.equal(part, own):
            raise ValueError(
                f"weight {_EMBEDDING} of the EAGLE-3 head differs from the target's embedding. Heads with their own "
                "embedding are not supported; use a head that was trained for this model."
            )

    def weight_map(self) -> WeightMap:
        """Return the map from names, with `midlayer` as `layers.0`, to parameters."""
        slots = [
            *self._combine.slots(""),
            *self._embedding_norm.slots(f"{_LAYER}input_layernorm"),
            *self._hidden_norm.slots(f"{_LAYER}hidden_norm"),
            *self._attention.slots(f"{_LAYER}self_attn."),
            *self._mlp_norm.slots(f"{_LAYER}post_attention_layernorm"),
            *self._mlp.slots(f"{_LAYER}mlp."),
            *self._norm.slots("norm"),
            *self._head.slots("lm_head"),
        ]
        ids = self._token_ids
        if not self._has_all_tokens:
            slots.append(
                WeightSlot("d2t", ids, None, on_load=self._read_token_ids, make_dummy=_no_distance)
            )
        return WeightMap(slots, ["d2t"] if self._has_all_tokens else [], groups=self._groups)

    def sharding(self) -> Iterator[ShardingSpec]:
        """List the sharding specs of all modules in order of computation."""
        whole, hidden = Replicated(), self._norm.weight.shape[0]
        yield ShardingSpec("fc", whole, whole, hidden)
        yield from self._target.embedding_sharding()
        yield from self._embedding_norm.sharding("embedding_norm")
        yield from self._blocks.attention_sharding("attention.")
        yield from self._mlp_norm.sharding("mlp_norm")
        yield from self._blocks.mlp_sharding("mlp.")
        yield from self._norm.sharding("norm")
        head, sampling = self._head.sharding("head")
        yield from bind_output((head,), self._bind_head)
        yield sampling

    def _bind_head(self, collective: Callable[[torch.Tensor], torch.Tensor]) -> None:
        size = self._head.vocab_size

        def head(hidden: torch.Tensor) -> torch.Tensor:
            return collective(self._head(hidden))[:, :size]

        self._run_head = head


def _no_distance(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return a map of draft ids to the same ids."""
    return torch.zeros(shape, dtype=torch.int64)
