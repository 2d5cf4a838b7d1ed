"""The OpenAI-compatible HTTP server of TokenSpeed: the API workers. They hold no model and no KV cache."""
