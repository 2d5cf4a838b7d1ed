"""The engine: the step loop, the process around it, and `LLM`, which runs it in the caller's process."""
