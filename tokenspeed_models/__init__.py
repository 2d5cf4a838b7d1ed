"""TokenSpeed's shared layers, weight maps and load formats, and the Llama and Qwen families.

What plugins may build on: `tokenspeed_models.config`, `.describe`, `.layers`, `.placement`, `.weights` and
`.testing`.
"""
