"""A DFlash drafter (arXiv:2602.06036) in plain PyTorch, from transformers' Qwen3 modules, and checkpoints of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.qwen3 import modeling_qwen3 as qwen3

Json = dict[str, Any]

# Keys of z-lab/Qwen3-8B-DFlash-b16, in small.
PUBLISHED: Json = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 6,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [2, 0]},
    "dtype": "float32",
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 64,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 8,
}
# Of weights whose draft tokens the target often accepts.
SEED = 200
# A target for it, as changes of `tiny_families.SMALL`.
TARGET: Json = {
    "vocab_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 160,
}


class Reference(nn.Module):
    """The published architecture. Projections, norms, MLPs and the rotation are transformers'."""

    def __init__(self, config: Json = PUBLISHED, seed: int = SEED) -> None:
        super().__init__()
        c = self.config = transformers.Qwen3Config(**config)
        self.layer_ids = config["dflash_config"]["target_layer_ids"]
        self.mask_token_id = config["dflash_config"]["mask_token_id"]
        hidden = c.hidden_size
        self.layers = nn.ModuleList(
            qwen3.Qwen3DecoderLayer(c, layer) for layer in range(c.num_hidden_layers)
        )
        self.fc = nn.Linear(len(self.layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = qwen3.Qwen3RMSNorm(hidden, c.rms_norm_eps)
        self.norm = qwen3.Qwen3RMSNorm(hidden, c.rms_norm_eps)
        self.rotary = qwen3.Qwen3RotaryEmbedding(c)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                mean = 1.0 if "norm" in name else 0.0
                parameter.normal_(mean, 0.2, generator=generator)

    def save(self, folder: Path, config: Json = PUBLISHED) -> None:
        """Write a checkpoint in the published layout."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})

    @torch.no_grad()
    def block(self, target: Any, token_ids: list[int], num_drafts: int) -> tuple[Tensor, Tensor]:
        """Return the hidden states [1 + num_drafts, hidden] of the block after tokens, and its draft tokens.

        The block starts with the last token, whose hidden states in the target are not known yet.
        """
        *before, last = token_ids
        states = target(torch.tensor([before]), output_hidden_states=True).hidden_states
        read = torch.cat([states[layer + 1][0] for layer in self.layer_ids], dim=-1)
        context = self.hidden_norm(self.fc(read))
        ids = torch.tensor([last] + num_drafts * [self.mask_token_id])
        x = target.get_input_embeddings()(ids)
        positions = torch.arange(len(before) + len(ids))[None]
        cos, sin = (each[0] for each in self.rotary(x, positions))
        for layer in self.layers:
            x = x + self._attend(layer, layer.input_layernorm(x), context, cos, sin)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        x = self.norm(x)
        return x, target.get_output_embeddings()(x[1:]).argmax(dim=-1)

    def _attend(self, layer: Any, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from a block to the context and to the block, without a mask."""
        attention, size, num = layer.self_attn, self.config.head_dim, len(x)
        both = torch.cat((context, x))
        q = attention.q_norm(attention.q_proj(x).unflatten(-1, (-1, size))).transpose(0, 1)
        k = attention.k_norm(attention.k_proj(both).unflatten(-1, (-1, size))).transpose(0, 1)
        v = attention.v_proj(both).unflatten(-1, (-1, size)).transpose(0, 1)
        q = q * cos[-num:] + qwen3.rotate_half(q) * sin[-num:]
        k = k * cos + qwen3.rotate_half(k) * sin
        repeats = len(q) // len(k)
        k, v = k.repeat_interleave(repeats, dim=0), v.repeat_interleave(repeats, dim=0)
        weights = (q @ k.transpose(1, 2) * size**-0.5).softmax(dim=-1)
        return attention.o_proj((weights @ v).transpose(0, 1).flatten(1))
