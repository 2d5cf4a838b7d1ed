"""The API process: HTTP in, requests to the engine, text out. It holds no tensor and no KV cache."""
