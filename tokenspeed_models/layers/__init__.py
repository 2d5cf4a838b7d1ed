"""Shared layers of decoder families: a public API for plugins.

A layer is a plain object that holds tensors and bound kernels. It is built from a `BuildContext`, called with
activations, and lists its weights (`slots`) and the sharding of its input and output (`sharding`).
"""

from __future__ import annotations

from tokenspeed_models.layers.attention import Attention
from tokenspeed_models.layers.causal_lm import CausalLM
from tokenspeed_models.layers.decoder import DecoderLayer, Layer, PostNormDecoderLayer
from tokenspeed_models.layers.embedding import Embedding, OutputHead
from tokenspeed_models.layers.experts import ExpertNames, Experts
from tokenspeed_models.layers.latent_attention import MultiHeadLatentAttention
from tokenspeed_models.layers.linear import Linear, Projection, bias_slot
from tokenspeed_models.layers.local_experts import LocalExperts, local_experts
from tokenspeed_models.layers.mlp import MLP
from tokenspeed_models.layers.moe import MoE, RoutedExperts, Router, SharedExperts
from tokenspeed_models.layers.multi_token_prediction import MultiTokenPredictor
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.layers.qk_norm import AllHeadNorm, HeadNorm
from tokenspeed_models.layers.rotary import inverse_frequencies, rotary_table
from tokenspeed_models.layers.rotary_decoder import RotaryDecoder, rotary_layer
from tokenspeed_models.layers.scheme import ModuleBuild, UnquantizedBuild, shared_scheme

__all__ = [
    "MLP",
    "AllHeadNorm",
    "Attention",
    "CausalLM",
    "DecoderLayer",
    "Embedding",
    "ExpertNames",
    "Experts",
    "HeadNorm",
    "Layer",
    "Linear",
    "LocalExperts",
    "MoE",
    "ModuleBuild",
    "MultiHeadLatentAttention",
    "MultiTokenPredictor",
    "OutputHead",
    "PostNormDecoderLayer",
    "Projection",
    "RMSNorm",
    "RotaryDecoder",
    "RoutedExperts",
    "Router",
    "SharedExperts",
    "UnquantizedBuild",
    "bias_slot",
    "dtype_name",
    "local_experts",
    "inverse_frequencies",
    "rotary_layer",
    "rotary_table",
    "shared_scheme",
]
