"""The DeepSeek-V3 architecture (arXiv:2412.19437) in small, for training: names and arithmetic are those of the published code."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from .model import MLP, attend
from .unrolled import Cache, attend_unrolled

# Change of an expert's routing bias per step, if the expert is used too much or too little.
BIAS_STEP = 1e-3


@dataclass(frozen=True, slots=True)
class DeepseekV3Config:
    """Sizes under the names of config.json."""

    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 768
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 4
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    n_shared_experts: int = 1
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 1
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def to_json(self, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
        """The contents of config.json."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **asdict(self),
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "moe_layer_freq": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_interleave": True,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [S, H, T, D] by cos and sin [S, 1, T, D / 2], neighbours paired."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)


class LatentAttention(nn.Module):
    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.config = config
        heads, eps = config.num_attention_heads, config.rms_norm_eps
        q_size = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * q_size, bias=False)
        entry_size = config.kv_lora_rank + config.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, entry_size, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps)
        expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: BlockMask | Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """x [S, T, hidden]; masks are as in `attend`, and with a cache as in `attend_unrolled`."""
        c = self.config
        shape = (*x.shape[:2], c.num_attention_heads, -1)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(shape).transpose(1, 2)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(
            [c.kv_lora_rank, c.qk_rope_head_dim], dim=-1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(shape).transpose(1, 2)
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k_rope = rotate_pairs(k_rope[:, None], cos, sin).expand(-1, c.num_attention_heads, -1, -1)
        q = torch.cat((q_nope, rotate_pairs(q_rope, cos, sin).to(v.dtype)), dim=-1)
        k = torch.cat((k_nope, k_rope.to(v.dtype)), dim=-1)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if cache is None:
            out = attend(q, k, v.contiguous(), mask)
        else:
            assert isinstance(mask, Tensor)
            out = attend_unrolled(q, k, v, mask, cache)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Router(nn.Module):
    """Chooses experts by sigmoid scores, within the best groups. A bias balances the choice without a loss."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        zeros = torch.zeros(config.n_routed_experts)
        self.register_buffer("e_score_correction_bias", zeros)
        self.register_buffer("load", zeros.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weight of each expert for x [N, hidden], [N, E], 0 for those that are not chosen."""
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        with torch.no_grad():
            wanted = scores + self.e_score_correction_bias
            groups = wanted.view(len(x), c.n_group, -1)
            best = groups.topk(2, dim=-1).values.sum(-1).topk(c.topk_group, dim=-1).indices
            is_open = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0)[..., None].bool()
            wanted = groups.masked_fill(~is_open, -torch.inf).flatten(1)
            chosen = wanted.topk(c.num_experts_per_tok, dim=-1).indices
            is_chosen = torch.zeros_like(scores).scatter(1, chosen, 1.0)
            self.load.add_(is_chosen.sum(0))
        weights = scores * is_chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor

    def balance(self) -> None:
        """Move the bias against the load since the last call."""
        self.e_score_correction_bias += BIAS_STEP * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


def balance_experts(model: nn.Module) -> None:
    """Balance the experts of all layers."""
    for module in model.modules():
        if isinstance(module, Router):
            module.balance()


class Experts(nn.Module):
    """Routed and shared experts. All are computed for all tokens: together they are as wide as one MLP."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.size = config.moe_intermediate_size
        self.gate = Router(config)
        self.experts = MLP(config.hidden_size, config.n_routed_experts * self.size)
        self.shared_experts = MLP(config.hidden_size, config.n_shared_experts * self.size)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x.flatten(0, 1)).view(*x.shape[:2], -1)
        hidden = F.silu(self.experts.gate_proj(x)) * self.experts.up_proj(x)
        hidden = hidden * weights.to(hidden.dtype).repeat_interleave(self.size, dim=-1)
        return self.experts.down_proj(hidden) + self.shared_experts(x)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: DeepseekV3Config, *, is_sparse: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = MLP(config.hidden_size, config.intermediate_size)
        self.mlp = Experts(config) if is_sparse else dense

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: BlockMask | Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class DraftLayer(Layer):
    """Multi-token prediction: from a hidden state and the next token to the token after it."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config, is_sparse=True)
        self.enorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.Module()
        self.shared_head.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def draft(
        self,
        hidden: Tensor,
        following: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: BlockMask | Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return normed hidden states [S, T, hidden].

        `hidden` are those of the model or of the step before, `following` the embeddings of the next tokens.
        """
        x = self.eh_proj(torch.cat((self.enorm(following), self.hnorm(hidden)), dim=-1))
        return self.shared_head.norm(self(x, cos, sin, mask, cache))  # type: ignore[no-any-return, operator]


class Body(nn.Module):
    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers: list[nn.Module] = [
            Layer(config, is_sparse=layer >= config.first_k_dense_replace)
            for layer in range(config.num_hidden_layers)
        ]
        layers += [DraftLayer(config) for _ in range(config.num_nextn_predict_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class DeepseekV3(nn.Module):
    """A DeepSeek-V3 language model with a layer that predicts the token after the next one."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        assert config.num_nextn_predict_layers == 1
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        size = config.qk_rope_head_dim
        inverse = config.rope_theta ** -(torch.arange(0, size, 2) / size)
        self.register_buffer("_inverse", inverse, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: BlockMask | Tensor
    ) -> tuple[Tensor, ...]:
        """Logits [S, T, vocab] of tokens and positions [S, T]: of the next token, and of the one after it."""
        hidden = self.hidden_states(tokens, positions, mask)
        following = self.model.embed_tokens(tokens.roll(-1, dims=1))
        drafted = self.draft_layer.draft(hidden, following, *self.rotary(positions), mask)
        return self.lm_head(hidden), self.lm_head(drafted)

    def hidden_states(self, tokens: Tensor, positions: Tensor, mask: BlockMask | Tensor) -> Tensor:
        """The normed output [S, T, hidden] of the last layer before the draft layer."""
        rotation = self.rotary(positions)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers[:-1]:
            x = layer(x, *rotation, mask)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [S, 1, T, qk_rope_head_dim / 2] of positions [S, T]."""
        angles = positions[:, None, :, None].float() * self._inverse  # type: ignore[operator]
        return angles.cos(), angles.sin()

    @property
    def draft_layer(self) -> DraftLayer:
        """The layer for multi-token prediction."""
        last = self.model.layers[-1]
        assert isinstance(last, DraftLayer)
        return last

    def after_step(self) -> None:
        """Balance the experts."""
        balance_experts(self)

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights under the published names: one tensor per expert, and the draft layer's copies."""
        found: dict[str, Tensor] = {}
        size = self.config.moe_intermediate_size
        for name, value in self.state_dict().items():
            before, is_expert, after = name.partition(".experts.")
            if not is_expert:
                found[name] = value
                continue
            for expert, part in enumerate(value.split(size, 1 if "down_proj" in name else 0)):
                found[f"{before}.experts.{expert}.{after}"] = part.contiguous()
        last = self.draft_prefix
        found[f"{last}.embed_tokens.weight"] = self.model.embed_tokens.weight.clone()
        found[f"{last}.shared_head.head.weight"] = self.lm_head.weight.clone()
        return found

    @property
    def draft_prefix(self) -> str:
        """The published name of the draft layer."""
        return f"model.layers.{self.config.num_hidden_layers}"

    def load_checkpoint(self, weights: dict[str, Tensor]) -> None:
        """Copy the weights that `checkpoint` returned."""
        joined: dict[str, Tensor] = {}
        for name in self.state_dict():
            before, is_expert, after = name.partition(".experts.")
            if is_expert:
                parts = [
                    weights[f"{before}.experts.{expert}.{after}"]
                    for expert in range(self.config.n_routed_experts)
                ]
                joined[name] = torch.cat(parts, dim=1 if "down_proj" in name else 0)
            else:
                joined[name] = weights[name]
        self.load_state_dict(joined)
