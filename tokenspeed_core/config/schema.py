"""The configuration: every setting with its section, help, unit and bounds.

Flags, environment variables, the YAML file, Python keywords and the parameter page are made from it.
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
    """Declare a setting. `narrow` are keys by which it may be set apart (`--flag.key`), `kind` the
    kind of plugin whose names it takes, `takes` the form of what no type tells.
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
    raise ValueError("must be at least 1, or -1 to turn chunking off")


class Config(BaseModel):
    """What the user asked for, frozen. Resolving "auto" makes a new object (`resolved`).

    Raises `pydantic.ValidationError` when built directly; `from_keywords` and the other sources raise
    `ConfigError`, whose message names the setting, the value, the bound and where the value came from.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    model: str | None = _setting(
        None, "model", "path or Hugging Face repo id; none: the bundled demo model", min_length=1
    )
    tokenizer: str | None = _setting(
        None, "model", "tokenizer path, where it is not the model's", min_length=1
    )
    skip_tokenizer_init: bool = _setting(False, "model", "no tokenizer: serve token ids only")
    load_format: str = _setting(
        "auto",
        "model",
        "how weights are read: auto, dummy, or a format that a plugin provides",
        min_length=1,
        kind="load_formats",
    )
    revision: str | None = _setting(
        None, "model", "branch, tag or commit of the repo", min_length=1
    )
    download_dir: str | None = _setting(
        None, "model", "where downloads are kept; none: Hugging Face's own cache", min_length=1
    )
    hf_overrides: Annotated[dict[str, Any], BeforeValidator(_json)] = _setting(
        {}, "model", "JSON object of values to override in the model's config.json", takes="JSON"
    )

    device: str = _setting(
        "auto",
        "device",
        "auto, cpu, cuda or cuda:N; auto: the first GPU, else the CPU",
        min_length=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto", "device", "type of weights and activations; auto follows the model's metadata"
    )
    quantization: str | None = _setting(
        None,
        "device",
        "linear maps in fewer bits, which slow a CPU down; none: as the checkpoint holds them",
        min_length=1,
        kind="quantization",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = _setting(
        "auto",
        "device",
        "type of the KV cache; auto: as --dtype; fp8_e4m3: half of 16 bits, less exact",
    )
    quantization_param_path: str | None = _setting(
        None,
        "device",
        "JSON file with each layer's scale of an fp8 KV cache; none: 1",
        min_length=1,
    )

    host: str = _setting("127.0.0.1", "api", "address to listen on", min_length=1)
    port: int = _setting(8000, "api", "port to listen on; 0 takes a free one", ge=0, le=65535)
    served_model_name: str | None = _setting(
        None, "api", "the model's name in the API", min_length=1
    )
    api_key: str | None = _setting(
        None, "api", "key that clients must send", min_length=1, repr=False
    )
    chat_template: str | None = _setting(
        None, "api", "Jinja file to use in place of the model's chat template", min_length=1
    )
    stream_interval: int = _setting(
        1, "api", "tokens buffered per streamed event", unit="tokens", ge=1, le=4096
    )
    max_queued_requests: int = _setting(
        4096, "api", "requests waiting, beyond which the server answers 429", unit="requests", ge=1
    )

    max_model_len: int | None = _setting(
        None, "scheduler", "longest sequence; none: the model's own", unit="tokens", ge=1
    )
    gpu_memory_utilization: float = _setting(
        0.9, "scheduler", "fraction of device memory for weights and KV cache", gt=0, le=1
    )
    max_num_seqs: int = _setting(
        256, "scheduler", "most sequences running at once", unit="sequences", ge=1, le=8192
    )
    chunked_prefill_size: Annotated[int, AfterValidator(_chunk)] = _setting(
        8192, "scheduler", "tokens that one step may compute; -1 turns chunking off", unit="tokens"
    )
    max_prefill_tokens: int = _setting(
        8192, "scheduler", "prompt tokens of one step when chunking is off", unit="tokens", ge=1
    )
    max_total_tokens: int | None = _setting(
        None, "scheduler", "size of the KV cache, in place of the computed one", unit="tokens", ge=1
    )
    kv_cache_memory: ByteSize | None = _setting(
        None,
        "scheduler",
        "size of the KV cache, such as 2GB or 512MiB; none: from the memory left",
        unit="bytes",
        takes="SIZE",
        ge=1,
    )
    block_size: int | None = _setting(
        None,
        "scheduler",
        "KV block size; none: what the backends do best",
        unit="tokens",
        ge=1,
        le=1024,
    )
    enable_prefix_caching: bool = _setting(
        True, "scheduler", "reuse the KV cache of equal prompt beginnings"
    )
    schedule_policy: str = _setting(
        "fcfs",
        "scheduler",
        "who runs first: fcfs, by arrival; priority, by the request's own; or a plugin's policy",
        min_length=1,
        kind="policies",
    )
    enforce_eager: bool = _setting(False, "scheduler", "no CUDA graphs")
    max_cudagraph_capture_size: int | None = _setting(
        None, "scheduler", "most rows of a captured CUDA graph", unit="rows", ge=1
    )
    cudagraph_capture_sizes: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...] | None, BeforeValidator(_split)
    ] = _setting(
        None,
        "scheduler",
        "the batch sizes to capture as CUDA graphs, such as 1,2,4,8",
        takes="N[,N...]",
    )
    seed: int = _setting(0, "scheduler", "seed of what requests leave random", ge=0, le=2**63 - 1)

    attention_backend: BackendChoice = _setting(
        {"default": AUTO},
        "backends",
        "attention backends in order of preference",
        narrow=("prefill", "decode"),
        kind="kernels.attention",
        takes="NAME[,NAME...]",
    )
    moe_backend: BackendChoice = _setting(
        {"default": AUTO},
        "backends",
        "expert backends in order of preference",
        narrow=("bf16", "fp16", "fp8", "mxfp8", "nvfp4"),
        kind="kernels.moe",
        takes="NAME[,NAME...]",
    )
    sampling_backend: BackendChoice = _setting(
        {"default": AUTO},
        "backends",
        "sampling backends in order of preference",
        kind="kernels.sampling",
        takes="NAME[,NAME...]",
    )
    kernel_backend: NamePairs = _setting(
        {},
        "backends",
        "backends of any op or op family: add_rms_norm=torch, attention.decode=triton; repeatable",
        takes="OP[.PHASE|.FORMAT]=NAME[,NAME...]",
    )
    backend_option: Pairs = _setting(
        {},
        "backends",
        "an option of a backend that is used, as its plugin declares it, a list as JSON; repeatable",
        takes="NAME.KEY=VALUE",
    )

    reasoning_parser: str | None = _setting(
        None,
        "parsers",
        "finds a chat's reasoning; none: it stays content",
        min_length=1,
        kind="reasoning_parsers",
    )
    tool_call_parser: str | None = _setting(
        None,
        "parsers",
        "finds a chat's tool calls; none: they stay content",
        min_length=1,
        kind="tool_parsers",
    )

    log_level: LogLevel = _setting("info", "observability", "least severe message shown")
    log_level_http: LogLevel | None = _setting(
        None, "observability", "the same for the HTTP server; none: as --log-level"
    )
    enable_log_requests: bool = _setting(
        False, "observability", "log a line for each request that ended"
    )
    enable_cache_report: bool = _setting(True, "observability", "report cached tokens in usage")

    api_workers: int | None = _setting(
        None,
        "running",
        "processes that serve HTTP; none: 2 where 16 processors may be used, else 1",
        unit="processes",
        ge=1,
        le=64,
    )
    no_plugins: bool = _setting(
        False, "running", "no plugins but those of tokenspeed-core[default]"
    )
    strict_plugins: bool = _setting(False, "running", "end when any plugin fails to load")
    plugins_lock: str | None = _setting(
        None, "running", "end unless plugins are as this file of plugins freeze says"
    )

    _origins: dict[str, str] = {}  # of which pydantic gives each configuration its own

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
                "--max-total-tokens and --kv-cache-memory both size the KV cache: give one"
            )
        if self.quantization_param_path is not None and self.kv_cache_dtype == "auto":
            raise ValueError(
                "--quantization-param-path scales a KV cache of --kv-cache-dtype fp8_e4m3: give both"
            )
        if self.skip_tokenizer_init and (self.reasoning_parser or self.tool_call_parser):
            raise ValueError(
                "--reasoning-parser and --tool-call-parser read text: none with --skip-tokenizer-init"
            )
        sizes, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        if sizes and largest is not None and max(sizes) > largest:
            raise ValueError(
                f"--cudagraph-capture-sizes has {max(sizes)}, above --max-cudagraph-capture-size {largest}"
            )
        for name, field in type(self).model_fields.items():
            keys = getattr(self, name) if field.default == {"default": AUTO} else ()
            for key in sorted({*keys} - {"default", *metadata(name)["narrow"]}):
                raise ValueError(f"{flag(name)}.{key} does not exist; there is {narrowed(name)}")
        return self

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Config:
        """Build from Python keywords. Raises ConfigError, with the nearest name for an unknown one."""
        from tokenspeed_core.config.build import build

        return build({name: (value, "Python") for name, value in keywords.items()})

    def origin(self, name: str) -> str:
        """Return where a setting's value came from: "default", "--flag", a variable, a file, or "auto"."""
        return self._origins.get(name, "default")

    def resolved(self, **values: Any) -> Config:
        """Return a new configuration in which what was "auto" has these values. Validates again.

        A value that stays as it was keeps its origin.
        """
        merged = type(self).model_validate({**self.model_dump(), **values})
        settled = (name for name in values if getattr(self, name) != getattr(merged, name))
        merged._origins.update(self._origins, **dict.fromkeys(settled, "auto"))
        return merged

    def to_wire(self) -> dict[str, Any]:
        """Return plain data (strings, numbers, lists, dicts) for another process."""
        return {"values": self.model_dump(mode="json"), "origins": dict(self._origins)}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Config:
        """Rebuild what `to_wire` returned."""
        config = cls.model_validate(data["values"])
        config._origins.update(data["origins"])
        return config


def flag(name: str) -> str:
    """Return the command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def is_switch(name: str) -> bool:
    """Say whether a setting is on or off, with a flag that takes no value."""
    return Config.model_fields[name].annotation is bool


def metadata(name: str) -> dict[str, Any]:
    """Return a setting's `section`, `unit`, `narrow` (its keys), `kind` (of plugins it names) and `takes`."""
    extra = Config.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return extra


def narrowed(name: str) -> str:
    """Return the flags that set a setting apart, for people."""
    keys = (
        ", ".join(f"{flag(name)}.{key}" for key in metadata(name)["narrow"])
        or f"{flag(name)} alone"
    )
    _, dot, family = str(metadata(name)["kind"]).partition(".")
    return f"{keys}; --kernel-backend {family}[.PHASE|.FORMAT]=NAME" if dot else keys


def choices(name: str) -> tuple[str, ...]:
    """Return the values that a setting is limited to, where it is limited to a few words."""
    kinds = (Config.model_fields[name].annotation, *get_args(Config.model_fields[name].annotation))
    return tuple(word for kind in kinds for word in get_args(kind) if isinstance(word, str))
