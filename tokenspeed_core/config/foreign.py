"""Names that this engine does not take: other engines' with what to use here, and those that are not built yet."""

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
    "max_num_batched_tokens": (
        "--chunked-prefill-size for the budget of one step, or --max-total-tokens for the whole KV cache"
    ),
}
NEEDLESS: dict[str, str] = {
    "swap_space": "a preempted sequence is computed again from the prefix cache",
    "enable_chunked_prefill": "chunking is on; --chunked-prefill-size -1 turns it off",
}
NOT_BUILT = frozenset(
    """
    tokenizer_mode trust_remote_code kv_cache_dtype kv_cache_quant_method quantization quantization_param_path
    stream_output tensor_parallel_size tp attn_tp_size dense_tp_size moe_tp_size data_parallel_size
    enable_expert_parallel expert_parallel_size ep_size world_size nprocs_per_node nnodes node_rank dist_init_addr
    drafter_attention_backend draft_moe_backend all2all_backend deepep_mode reasoning_parser tool_call_parser
    enable_custom_logit_processor speculative_config speculative_algorithm speculative_draft_model_path
    speculative_draft_model_quantization speculative_num_steps speculative_num_draft_tokens speculative_eagle_topk
    eagle3_layers_to_capture log_requests_level enable_metrics metrics_reporters decode_log_interval kv_events_config
    enable_mla_l1_5_cache mla_chunk_multiplier comm_fusion_max_num_tokens enable_allreduce_fusion dp_sampling
    api_workers profile backend_option plugins_lock
    """.split()
)
NOT_BUILT_FAMILIES = ("kvstore_", "disaggregation_")


def refuse_foreign(name: str) -> str | None:
    """Return what to use in place of a name that is not taken, or None for a name of nobody."""
    key = name.replace("-", "_").removeprefix("no_").partition(".")[0]
    if key in RENAMED:
        return f"that is another engine's name; here it is --{RENAMED[key].replace('_', '-')}"
    if key in TURNED:
        return f"that is another engine's name; here use {TURNED[key]}"
    if key in NEEDLESS:
        return f"that is another engine's name, and nothing is needed here: {NEEDLESS[key]}"
    if key in NOT_BUILT or key.startswith(NOT_BUILT_FAMILIES):
        return "not built yet"
    return None
