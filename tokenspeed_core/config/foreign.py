"""Names that other engines use and this one does not, each with what to use here."""

from __future__ import annotations

RENAMED: dict[str, str] = {
    "model_path": "model",
    "tokenizer_path": "tokenizer",
    "context_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "mem_fraction_static": "gpu_memory_utilization",
    "max_running_requests": "max_num_seqs",
    "max_batch_size": "max_num_seqs",
    "page_size": "block_size",
    "max_num_tokens": "chunked_prefill_size",
    "max_queue_size": "max_queued_requests",
    "scheduling_policy": "schedule_policy",
    "random_seed": "seed",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "json_model_override_args": "hf_overrides",
    "decode_attention_backend": "attention_backend.decode",
    "prefill_attention_backend": "attention_backend.prefill",
    "moe_runner_backend": "moe_backend",
    "cuda_graph_max_bs": "max_cudagraph_capture_size",
    "cuda_graph_bs": "cudagraph_capture_sizes",
    "log_requests": "enable_log_requests",
    "enable_request_logging": "enable_log_requests",
    "log_level_uvicorn": "log_level_http",
    "uvicorn_log_level": "log_level_http",
}
TURNED: dict[str, str] = {
    "disable_radix_cache": "--no-enable-prefix-caching",
    "disable_cuda_graph": "--enforce-eager",
    "disable_log_requests": "--no-enable-log-requests, which is the default",
    "enable_chunked_prefill": "nothing: chunking is on; --chunked-prefill-size -1 turns it off",
    "max_num_batched_tokens": (
        "--chunked-prefill-size for the budget of one step, or --max-total-tokens for the whole KV cache"
    ),
    "swap_space": "nothing: a preempted sequence is computed again from the prefix cache",
}


def refuse_foreign(name: str) -> str | None:
    """Return what to use in place of another engine's name, or None for a name of nobody."""
    key = name.replace("-", "_")
    if key in RENAMED:
        return f"that is another engine's name; here it is --{RENAMED[key].replace('_', '-')}"
    if key in TURNED:
        return f"that is another engine's name; here use {TURNED[key]}"
    return None
