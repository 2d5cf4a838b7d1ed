"""The descriptors that the entry points name. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import LoadFormat, ModelDrafterSpec, ModelSpec

LLAMA = ModelSpec(
    architecture="LlamaForCausalLM",
    describe="tokenspeed_models.describe:describe_llama",
    load="tokenspeed_models.families.llama:LlamaForCausalLM",
)
QWEN2 = ModelSpec(
    architecture="Qwen2ForCausalLM",
    describe="tokenspeed_models.describe:describe_qwen2",
    load="tokenspeed_models.families.qwen2:Qwen2ForCausalLM",
)
QWEN3 = ModelSpec(
    architecture="Qwen3ForCausalLM",
    describe="tokenspeed_models.describe:describe_qwen3",
    load="tokenspeed_models.families.qwen3:Qwen3ForCausalLM",
)
QWEN3_MOE = ModelSpec(
    architecture="Qwen3MoeForCausalLM",
    describe="tokenspeed_models.describe:describe_qwen3_moe",
    load="tokenspeed_models.families.qwen3_moe:Qwen3MoeForCausalLM",
)

SAFETENSORS = LoadFormat(
    name="safetensors",
    load="tokenspeed_models.loading.safetensors:read_safetensors",
    detect=("*.safetensors", "*.safetensors.index.json"),
    kv_scales="tokenspeed_models.loading.kv_scales:read_kv_scales",
)
# These files are pickles. They are read with weights_only=True, and only if the user names the format.
PT = LoadFormat(
    name="pt",
    load="tokenspeed_models.loading.pt:read_pt",
    detect=("pytorch_model*.bin", "pytorch_model*.bin.index.json", "*.pt", "*.pth"),
    by_name_only=True,
)
DUMMY = LoadFormat(name="dummy", load="tokenspeed_models.loading.dummy:read_dummy", detect=())

EAGLE3 = ModelDrafterSpec(
    check="tokenspeed_models.drafters.eagle3_config:check",
    plan="tokenspeed_models.drafters.eagle3_config:plan",
    needs_checkpoint=True,
)
DFLASH = ModelDrafterSpec(
    check="tokenspeed_models.drafters.dflash_config:check",
    plan="tokenspeed_models.drafters.dflash_config:plan",
    needs_checkpoint=True,
)
