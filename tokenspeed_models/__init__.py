"""TokenSpeed's shared layers, weight loading, and the Llama and Qwen families.

Plugins may import `tokenspeed_models.config`, `.describe`, `.layers`, `.moe_config`, `.rope_config`, `.sharding`,
`.weights` and `.testing`.
"""
