"""The configuration: every setting with its section, help, unit and bounds.

Flags, environment variables, YAML keys, Python keywords and the parameter page are generated from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    model_validator,
)

from tokenspeed_core.config.backends import AUTO, BackendChoice, NamePairs, Pairs

Section = Literal[
    "model", "device", "api", "scheduler", "backends", "parsers", "observability", "running"
]
SECTIONS: dict[Section, str] = {
    "model": "Model loading",
    "device": "Device and precision",
    "api": "API surface",
    "scheduler": "Scheduler and memory",
    "backends": "Backends",
    "parsers": "Reasoning and tools",
    "observability": "Observability",
    "running": "Running",
}
LogLevel = Literal["debug", "info", "warning", "error", "critical"]


def _setting(
    default: Any,
    section: Section,
    text: str,
    *,
    unit: str | None = None,
    narrow: tuple[str, ...] = (),
    kind: str | None = None,
    takes: str | None = None,
    **bounds: Any,
) -> Any:
    """Declare a setting.

    `narrow` are the keys of more specific flags (`--flag.key`), `kind` is the kind of plugin that the
    setting names, and `takes` describes the value if its type does not.
    """
    extra: dict[str, Any] = {
        "section": section,
        "unit": unit,
        "narrow": list(narrow),
        "kind": kind,
        "takes": takes,
    }
    return Field(default, description=text, json_schema_extra=extra, **bounds)


def _split(value: Any) -> Any:
    """Read `1,2,4` or `[1, 2, 4]` as a list."""
    if isinstance(value, str):
        return [item.strip() for item in value.strip("[] ").split(",")]
    return value


def _json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error}") from error


def _chunk(value: int) -> int:
    if value == -1 or value > 0:
        return value
    raise ValueError("must be at least 1, or -1 to disable chunked prefill")


class Config(BaseModel):
    """The user's settings, frozen. Resolving "auto" returns a new object (`resolved`).

    The constructor raises `pydantic.ValidationError`. `from_keywords` and the other sources raise
    `ConfigError` with the setting, its value and its origin.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    model: str | None = _setting(
        None,
        "model",
        "Path or Hugging Face repo id; default: the bundled demo model.",
        min_length=1,
    )
    tokenizer: str | None = _setting(
        None, "model", "Path of the tokenizer; default: the model's.", min_length=1
    )
    skip_tokenizer_init: bool = _setting(
        False, "model", "Serve token ids without loading a tokenizer."
    )
    load_format: str = _setting(
        "auto",
        "model",
        "Format of the weights: auto, dummy (random), or one from a plugin.",
        min_length=1,
        kind="load_formats",
    )
    revision: str | None = _setting(
        None, "model", "Branch, tag or commit of the repo.", min_length=1
    )
    download_dir: str | None = _setting(
        None, "model", "Folder for downloads; default: the Hugging Face cache.", min_length=1
    )
    hf_overrides: Annotated[dict[str, Any], BeforeValidator(_json)] = _setting(
        {}, "model", "JSON object that overrides values of the model's config.json.", takes="JSON"
    )

    device: str = _setting(
        "auto",
        "device",
        "Device: cpu, cuda, cuda:N, or auto for the first GPU, else the CPU.",
        min_length=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto", "device", "Data type of weights and activations; auto uses the model's."
    )
    quantization: str | None = _setting(
        None,
        "device",
        "Quantize linear layers (slower on CPU); default: the checkpoint's format.",
        min_length=1,
        kind="quantization",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = _setting(
        "auto",
        "device",
        "Data type of the KV cache; auto uses --dtype.",
    )
    quantization_param_path: str | None = _setting(
        None,
        "device",
        "JSON file with per-layer scales of an FP8 KV cache; default: scale 1.",
        min_length=1,
    )

    host: str = _setting("127.0.0.1", "api", "Address to listen on.", min_length=1)
    port: int = _setting(8000, "api", "Port to listen on; 0 selects a free port.", ge=0, le=65535)
    served_model_name: str | None = _setting(
        None, "api", "Model name in the API; default: derived from --model.", min_length=1
    )
    api_key: str | None = _setting(
        None, "api", "API key that clients must send.", min_length=1, repr=False
    )
    chat_template: str | None = _setting(
        None, "api", "Jinja file that replaces the model's chat template.", min_length=1
    )
    stream_interval: int = _setting(
        1, "api", "Number of tokens per streamed event.", unit="tokens", ge=1, le=4096
    )
    max_queued_requests: int = _setting(
        4096,
        "api",
        "Maximum number of waiting requests; further ones get status 429.",
        unit="requests",
        ge=1,
    )

    max_model_len: int | None = _setting(
        None,
        "scheduler",
        "Maximum length of a sequence; default: the model's.",
        unit="tokens",
        ge=1,
    )
    gpu_memory_utilization: float = _setting(
        0.9, "scheduler", "Fraction of device memory for weights and KV cache.", gt=0, le=1
    )
    max_num_seqs: int = _setting(
        256,
        "scheduler",
        "Maximum number of sequences running at once.",
        unit="sequences",
        ge=1,
        le=8192,
    )
    chunked_prefill_size: Annotated[int, AfterValidator(_chunk)] = _setting(
        8192,
        "scheduler",
        "Maximum number of tokens in a step; -1 disables chunked prefill.",
        unit="tokens",
    )
    max_prefill_tokens: int = _setting(
        8192,
        "scheduler",
        "Maximum number of prompt tokens in a step without chunked prefill.",
        unit="tokens",
        ge=1,
    )
    max_total_tokens: int | None = _setting(
        None,
        "scheduler",
        "Size of the KV cache in tokens; default: computed from free memory.",
        unit="tokens",
        ge=1,
    )
    kv_cache_memory: ByteSize | None = _setting(
        None,
        "scheduler",
        "Size of the KV cache, such as 2GB; default: computed from free memory.",
        unit="bytes",
        takes="SIZE",
        ge=1,
    )
    block_size: int | None = _setting(
        None,
        "scheduler",
        "Size of a KV block; default: chosen for the attention backends.",
        unit="tokens",
        ge=1,
        le=1024,
    )
    enable_prefix_caching: bool = _setting(
        True, "scheduler", "Reuse the KV cache of shared prompt prefixes."
    )
    schedule_policy: str = _setting(
        "fcfs",
        "scheduler",
        "Scheduling policy: fcfs (by arrival), priority, or one from a plugin.",
        min_length=1,
        kind="policies",
    )
    enforce_eager: bool = _setting(False, "scheduler", "Disable CUDA graphs.")
    max_cudagraph_capture_size: int | None = _setting(
        None, "scheduler", "Maximum number of rows in a captured CUDA graph.", unit="rows", ge=1
    )
    cudagraph_capture_sizes: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...] | None, BeforeValidator(_split)
    ] = _setting(
        None,
        "scheduler",
        "Batch sizes to capture as CUDA graphs, such as 1,2,4,8.",
        takes="N[,N...]",
    )
    seed: int = _setting(
        0, "scheduler", "Random seed for requests without their own.", ge=0, le=2**63 - 1
    )

    attention_backend: BackendChoice = _setting(
        {"default": AUTO},
        "backends",
        "Attention backends in order of preference.",
        narrow=("prefill", "decode"),
        kind="kernels.attention",
        takes="NAME[,NAME...]",
    )
    moe_backend: BackendChoice = _setting(
        {"default": AUTO},
        "backends",
        "Mixture-of-experts backends in order of preference.",
        kind="kernels.moe",
        takes="NAME[,NAME...]",
    )
    sampling_backend: BackendChoice = _setting(
        {"default": AUTO},
        "backends",
        "Sampling backends in order of preference.",
        kind="kernels.sampling",
        takes="NAME[,NAME...]",
    )
    kernel_backend: NamePairs = _setting(
        {},
        "backends",
        "Backends of an op or family, such as attention.decode=triton; repeatable.",
        takes="OP[.PHASE|.FORMAT]=NAME[,NAME...]",
    )
    backend_option: Pairs = _setting(
        {},
        "backends",
        "Option of a selected backend, such as triton.max_splits=1; repeatable.",
        takes="NAME.KEY=VALUE",
    )

    reasoning_parser: str | None = _setting(
        None,
        "parsers",
        "Parser that extracts reasoning from chat replies; default: none.",
        min_length=1,
        kind="reasoning_parsers",
    )
    tool_call_parser: str | None = _setting(
        None,
        "parsers",
        "Parser that extracts tool calls from chat replies; default: none.",
        min_length=1,
        kind="tool_parsers",
    )

    log_level: LogLevel = _setting("info", "observability", "Minimum severity of log messages.")
    log_level_http: LogLevel | None = _setting(
        None,
        "observability",
        "Minimum severity of the HTTP server's messages; default: --log-level.",
    )
    enable_log_requests: bool = _setting(False, "observability", "Log each finished request.")
    enable_cache_report: bool = _setting(True, "observability", "Report cached tokens in usage.")

    api_workers: int | None = _setting(
        None,
        "running",
        "Number of HTTP processes; default: 2 with 16 or more CPUs, else 1.",
        unit="processes",
        ge=1,
        le=64,
    )
    no_plugins: bool = _setting(
        False, "running", "Disable all plugins except the default distributions."
    )
    strict_plugins: bool = _setting(
        False, "running", "Refuse to start if any plugin fails to load."
    )
    plugins_lock: str | None = _setting(
        None, "running", "Refuse to start unless the installed plugins match this lock file."
    )

    # pydantic copies the default for each instance.
    _origins: dict[str, str] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, bool) and name in cls.model_fields and not is_switch(name):
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
        if self.skip_tokenizer_init and (self.reasoning_parser or self.tool_call_parser):
            raise ValueError(
                "--reasoning-parser and --tool-call-parser need a tokenizer; remove --skip-tokenizer-init"
            )
        sizes, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        if sizes and largest is not None and max(sizes) > largest:
            raise ValueError(
                f"--cudagraph-capture-sizes {max(sizes)} exceeds --max-cudagraph-capture-size {largest}"
            )
        for name, field in type(self).model_fields.items():
            keys = getattr(self, name) if field.default == {"default": AUTO} else ()
            for key in sorted({*keys} - {"default", *metadata(name)["narrow"]}):
                raise ValueError(f"no such setting {flag(name)}.{key}; available: {narrowed(name)}")
        return self

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Config:
        """Build a configuration from Python keywords. Raises ConfigError."""
        from tokenspeed_core.config.build import build

        return build({name: (value, "Python") for name, value in keywords.items()})

    def origin(self, name: str) -> str:
        """Return where a value came from: "default", "auto", a flag, a variable, a file or a plugin."""
        return self._origins.get(name, "default")

    def resolved(self, **values: Any) -> Config:
        """Return a new, validated configuration with these values for "auto".

        A value that does not change keeps its origin.
        """
        merged = type(self).model_validate({**self.model_dump(), **values})
        settled = (name for name in values if getattr(self, name) != getattr(merged, name))
        merged._origins.update(self._origins, **dict.fromkeys(settled, "auto"))
        return merged

    def to_wire(self) -> dict[str, Any]:
        """Return plain data for another process."""
        return {"values": self.model_dump(mode="json"), "origins": dict(self._origins)}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Config:
        """Build a configuration from the result of `to_wire`."""
        config = cls.model_validate(data["values"])
        config._origins.update(data["origins"])
        return config


def flag(name: str) -> str:
    """Return the command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def is_switch(name: str) -> bool:
    """Say whether a setting is a flag without a value."""
    return Config.model_fields[name].annotation is bool


def metadata(name: str) -> dict[str, Any]:
    """Return a setting's `section`, `unit`, `narrow`, `kind` and `takes`; see `_setting`."""
    extra = Config.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return extra


def narrowed(name: str) -> str:
    """Return the more specific flags of a setting, for messages."""
    keys = (
        ", ".join(f"{flag(name)}.{key}" for key in metadata(name)["narrow"])
        or f"{flag(name)} alone"
    )
    _, dot, family = str(metadata(name)["kind"]).partition(".")
    return f"{keys}; --kernel-backend {family}[.PHASE|.FORMAT]=NAME" if dot else keys


def choices(name: str) -> tuple[str, ...]:
    """Return the allowed words of a setting, empty if it takes other values."""
    kinds = (Config.model_fields[name].annotation, *get_args(Config.model_fields[name].annotation))
    return tuple(word for kind in kinds for word in get_args(kind) if isinstance(word, str))
