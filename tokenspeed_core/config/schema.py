"""The configuration: every setting with its section, help, unit and bounds.

Flags, environment variables, YAML keys, Python keywords and the parameter page are generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, model_validator

from tokenspeed_core.config.backends import (
    AUTO,
    PHASES,
    BackendChoice,
    NamePairs,
    Names,
    Pairs,
    backends,
)
from tokenspeed_core.config.build import PYTHON, build
from tokenspeed_core.config.kv_events import KVEventsConfig
from tokenspeed_core.config.parallel_settings import ParallelSettings
from tokenspeed_core.config.readers import (
    CacheDtypeName,
    DtypeName,
    OptionalTokenCount,
    TokenCount,
    json_value,
    split_numbers,
)
from tokenspeed_core.config.settings import flag, setting
from tokenspeed_core.config.speculation_settings import SpeculationSettings
from tokenspeed_core.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error", "critical"]


def _chunk(value: int) -> int:
    if value == -1 or value > 0:
        return value
    raise ValueError("must be at least 1, or -1 to disable chunked prefill")


class Config(ParallelSettings, SpeculationSettings):
    """The settings of a model and its engine, frozen. The server extends them.

    Resolving "auto" returns a new object (`resolved`).

    The constructor raises `pydantic.ValidationError`. `from_keywords` and the other sources raise
    `ConfigError` with the setting, its value and its origin.
    """

    model: str | None = setting(
        None,
        "model",
        "Path or Hugging Face repo id; default: the bundled demo model.",
        min_length=1,
    )
    tokenizer: str | None = setting(
        None, "model", "Path of the tokenizer; default: the model's.", min_length=1
    )
    skip_tokenizer_init: bool = setting(
        False, "model", "Serve token ids without loading a tokenizer."
    )
    load_format: str = setting(
        "auto",
        "model",
        "Format of the weights: auto, dummy (random), or one from a plugin.",
        min_length=1,
        kind="load_formats",
    )
    trust_remote_code: bool = setting(
        False,
        "model",
        "Run code from the model's repository if no installed family supports the model.",
    )
    revision: str | None = setting(
        None, "model", "Branch, tag or commit of the Hugging Face repo.", min_length=1
    )
    download_dir: str | None = setting(
        None, "model", "Folder for downloads; default: the Hugging Face cache.", min_length=1
    )
    hf_overrides: Annotated[dict[str, Any], BeforeValidator(json_value)] = setting(
        {}, "model", "JSON object that overrides values of the model's config.json.", takes="JSON"
    )

    chat_template: str | None = setting(
        None, "model", "Jinja file that replaces the model's chat template.", min_length=1
    )
    enable_custom_logit_processor: bool = setting(
        False, "model", "Let requests use installed logits processors."
    )

    device: str = setting(
        "auto",
        "device",
        "Device: cpu, cuda, cuda:N, or auto for the first GPU, else the CPU.",
        min_length=1,
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], DtypeName] = setting(
        "auto", "device", "Data type of weights and activations; auto uses the model's."
    )
    quantization: str | None = setting(
        None,
        "device",
        "Quantize linear layers (slower on CPU); default: the checkpoint's format.",
        min_length=1,
        kind="quantization",
    )
    kv_cache_dtype: Annotated[Literal["auto", "fp8_e4m3"], CacheDtypeName] = setting(
        "auto",
        "device",
        "Data type of the KV cache; auto uses --dtype.",
    )
    quantization_param_path: str | None = setting(
        None,
        "device",
        "JSON file with scales of an FP8 KV cache; default: from the checkpoint, or 1.",
        min_length=1,
    )

    max_queued_requests: int = setting(
        4096,
        "limits",
        "Maximum number of waiting sequences; more are rejected with status 429.",
        unit="sequences",
        is_for_servers=True,
        ge=1,
    )
    max_queued_tokens: int | None = setting(
        None,
        "limits",
        "Maximum number of prompt tokens of the waiting sequences; default: none.",
        unit="tokens",
        is_for_servers=True,
        ge=1,
    )
    max_sequences_per_key: int | None = setting(
        None,
        "limits",
        "Maximum unfinished sequences per API key; more are rejected with status 429.",
        unit="sequences",
        is_for_servers=True,
        ge=1,
    )

    max_model_len: OptionalTokenCount = setting(
        None,
        "scheduler",
        "Maximum length of a sequence; default: the model's.",
        unit="tokens",
        ge=1,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "scheduler",
        "Fraction of device memory to fill, including memory of other programs.",
        gt=0,
        le=1,
    )
    max_num_seqs: int = setting(
        256,
        "scheduler",
        "Maximum number of sequences running at once.",
        unit="sequences",
        ge=1,
        le=8192,
    )
    chunked_prefill_size: Annotated[TokenCount, AfterValidator(_chunk)] = setting(
        8192,
        "scheduler",
        "Maximum number of tokens in a step; -1 disables chunked prefill.",
        unit="tokens",
    )
    max_prefill_tokens: TokenCount = setting(
        8192,
        "scheduler",
        "Maximum number of prompt tokens in a step without chunked prefill.",
        unit="tokens",
        ge=1,
    )
    max_total_tokens: OptionalTokenCount = setting(
        None,
        "scheduler",
        "Size of the KV cache in tokens; default: computed from free memory.",
        unit="tokens",
        ge=1,
    )
    kv_cache_memory: ByteSize | None = setting(
        None,
        "scheduler",
        "Size of the KV cache, such as 2GB; default: computed from free memory.",
        unit="bytes",
        takes="SIZE",
        ge=1,
    )
    block_size: int | None = setting(
        None,
        "scheduler",
        "Size of a KV block; default: chosen for the attention backends.",
        unit="tokens",
        ge=1,
        le=1024,
    )
    enable_prefix_caching: bool = setting(
        True, "scheduler", "Reuse the KV cache of shared prompt prefixes."
    )
    schedule_policy: str = setting(
        "fcfs",
        "scheduler",
        "Scheduling policy: fcfs (by arrival), priority, or one from a plugin.",
        min_length=1,
        kind="policies",
    )
    enforce_eager: bool = setting(False, "scheduler", "Disable CUDA graphs.")
    max_cudagraph_capture_size: int | None = setting(
        None, "scheduler", "Maximum number of rows in a captured CUDA graph.", unit="rows", ge=1
    )
    cudagraph_capture_sizes: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...] | None, BeforeValidator(split_numbers)
    ] = setting(
        None,
        "scheduler",
        "Batch sizes to capture as CUDA graphs, such as 1,2,4,8.",
        takes="N[,N...]",
    )
    seed: int = setting(0, "scheduler", "Seed of requests that set none.", ge=0, le=2**63 - 1)

    attention_backend: BackendChoice = backends(
        "attention",
        "backends",
        "Attention backends by preference; end with auto to allow others.",
        narrow=PHASES,
    )
    # With 1, a prefill takes no more memory than the largest step, which is measured at start.
    mla_chunk_multiplier: int = setting(
        1,
        "backends",
        "Cached tokens that MLA prefill expands at once, per token of the largest step.",
        ge=1,
        le=1024,
    )
    all2all_backend: Names = setting(
        AUTO,
        "backends",
        "All-to-all backends by preference, for experts that engines share.",
        kind="kernels.comm",
        takes="NAME[,NAME...]",
        is_for_servers=True,
    )
    deepep_mode: Literal["auto", "normal", "low_latency"] = setting(
        "auto",
        "backends",
        "Kernel mode of the all-to-all backend deepep.",
        is_for_servers=True,
    )
    moe_backend: BackendChoice = backends(
        "moe",
        "backends",
        "Mixture-of-experts backends by preference; end with auto to allow others.",
    )
    sampling_backend: BackendChoice = backends(
        "sampling",
        "backends",
        "Sampling backends by preference; end with auto to allow others.",
    )
    grammar_backend: str = setting(
        "auto",
        "backends",
        "Backend of structured output: auto (the fastest installed), none, or a name.",
        min_length=1,
        kind="grammars",
    )
    kernel_backend: NamePairs = setting(
        {},
        "backends",
        "Backends of an op or family, such as attention.decode=triton; repeatable.",
        takes="OP[.PHASE|.FORMAT]=NAME[,NAME...]",
    )
    backend_option: Pairs = setting(
        {},
        "backends",
        "Option of a selected backend, such as triton.max_splits=1; repeatable.",
        takes="NAME.KEY=VALUE",
    )

    log_level: LogLevel = setting("info", "observability", "Minimum severity of log messages.")
    log_format: Literal["text", "json"] = setting(
        "text",
        "observability",
        "Log lines as text, or as JSON objects with named fields.",
        is_for_servers=True,
    )
    kv_events_config: Annotated[KVEventsConfig | None, BeforeValidator(json_value)] = setting(
        None,
        "observability",
        "Configuration of the KV event publisher, as a JSON object; default: none.",
        takes="JSON",
    )

    no_plugins: bool = setting(
        False, "running", "Disable all plugins except the default distributions."
    )
    strict_plugins: bool = setting(False, "running", "Refuse to start if any plugin fails to load.")
    plugins_lock: str | None = setting(
        None, "running", "Refuse to start unless the installed plugins match this lock file."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, bool) and name in cls.model_fields and not cls.is_switch(name):
                raise ValueError(f"{flag(name)} takes a value, not {str(value).lower()}")
        return values

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.max_total_tokens is not None and self.kv_cache_memory is not None:
            raise ValueError(
                "--max-total-tokens and --kv-cache-memory both set the size of the KV cache; use one"
            )
        if self.quantization_param_path is not None and self.kv_cache_dtype == "auto":
            raise ValueError("--quantization-param-path requires --kv-cache-dtype fp8_e4m3")
        if self.deepep_mode != "auto" and "deepep" not in self.all2all_backend:
            raise ValueError("--deepep-mode has no effect without --all2all-backend deepep")
        if self.all2all_backend != AUTO and not self.parallel_sizes().shares_experts:
            raise ValueError(
                "--all2all-backend has no effect: no engines share experts; set --data-parallel-size with "
                "--enable-expert-parallel, or remove --all2all-backend"
            )
        sizes, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        if sizes and largest is not None and max(sizes) > largest:
            raise ValueError(
                f"--cudagraph-capture-sizes {max(sizes)} exceeds --max-cudagraph-capture-size {largest}"
            )
        for name, field in type(self).model_fields.items():
            keys = getattr(self, name) if field.default == {"default": AUTO} else ()
            for key in sorted({*keys} - {"default", *self.metadata(name)["narrow"]}):
                raise ValueError(
                    f"no such setting {flag(name)}.{key}; available: {self.narrowed(name)}"
                )
        return self

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Self:
        """Build a configuration from Python keywords. Raises ConfigError."""
        values = {cls.full_name(name): (value, PYTHON) for name, value in keywords.items()}
        return build(cls, values)

    def resolved(self, **values: Any) -> Self:
        """Return a new, validated configuration with these values for "auto".

        A value that does not change keeps its origin.
        """
        merged = type(self).model_validate({**self.model_dump(), **values})
        settled = (name for name in values if getattr(self, name) != getattr(merged, name))
        merged._origins.update(self._origins, **dict.fromkeys(settled, "auto"))
        return merged

    @property
    def draft_load_format(self) -> str:
        """The format of the draft model's weights."""
        return self.speculative_draft_load_format or self.load_format

    @property
    def backend_options(self) -> Mapping[str, Any]:
        """The options of backends, those with a flag of their own included."""
        if self.deepep_mode == "auto":
            return self.backend_option
        return {"deepep.mode": self.deepep_mode, **self.backend_option}

    def for_engine(self) -> Config:
        """Return only the engine's settings, without the settings of a subclass."""
        names = Config.model_fields
        engine = Config.model_validate(self.model_dump(include=set(names)))
        engine._origins.update({k: v for k, v in self._origins.items() if k in names})
        return engine

    def to_wire(self) -> dict[str, Any]:
        """Return plain data for another process."""
        return {"values": self.model_dump(mode="json"), "origins": dict(self._origins)}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Self:
        """Build a configuration from the result of `to_wire`."""
        config = cls.model_validate(data["values"])
        config._origins.update(data["origins"])
        return config


C = TypeVar("C", bound=Config)


def read_keywords(model: str | None, settings: Mapping[str, Any]) -> Config:
    """Return the configuration of `LLM` or `AsyncLLM` from its keywords. Raises ConfigError."""
    for name in settings:
        if name in Config.model_fields and Config.metadata(name)["is_for_servers"]:
            raise ConfigError(f"{name} is a setting of a server; remove it")
    return Config.from_keywords(**({} if model is None else {"model": model}), **settings)
