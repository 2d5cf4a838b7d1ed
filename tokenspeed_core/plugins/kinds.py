"""The kinds of plugins, each an entry-point group `tokenspeed.<kind>` with an api number."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_PREFIX = "tokenspeed."
KERNELS_PREFIX = "kernels."  # kernels.<op family>; a plugin may bring families unknown to the core


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin. `api` is the contract's number; entries name theirs as `value [api1]`.

    `is_named`: users type the entries' names, so two distributions must not claim the same one.
    """

    api: int
    text: str
    is_named: bool = True


KERNELS = Kind(1, "implementations of an op family, by backend name")
KINDS: dict[str, Kind] = {
    "kernels.attention": KERNELS,
    "kernels.mla": KERNELS,
    "kernels.cache": KERNELS,
    "kernels.norm": KERNELS,
    "kernels.rope": KERNELS,
    "kernels.activation": KERNELS,
    "kernels.linear": KERNELS,
    "kernels.moe": KERNELS,
    "kernels.sampling": KERNELS,
    "kernels.comm": KERNELS,
    "models": Kind(1, "model families, by the architectures name of config.json"),
    "load_formats": Kind(1, "ways to read weights, for --load-format"),
    "checkpoints": Kind(1, "names for checkpoints in packages"),
    "ops": Kind(1, "op contracts"),
    "hooks": Kind(1, "behaviour: modules of hook implementations", is_named=False),
    "commands": Kind(1, "subcommands of tokenspeed"),
    "policies": Kind(1, "scheduling policies"),
    "platforms": Kind(1, "kinds of device, for --device"),
    "executors": Kind(1, "ways to run workers"),
    "tokenizers": Kind(1, "tokenizers"),
    "tool_parsers": Kind(1, "parsers of tool calls"),
    "reasoning_parsers": Kind(1, "parsers of reasoning"),
    "quantization": Kind(1, "quantization methods"),
    "apis": Kind(1, "dialects of HTTP"),
    "grammar": Kind(1, "grammar engines"),
    "drafters": Kind(1, "speculative drafters"),
    "kv_stores": Kind(1, "stores behind the KV cache"),
}


def kind_of(name: str) -> Kind | None:
    """Return the kind of that name, or None where the core knows no such kind."""
    if name in KINDS:
        return KINDS[name]
    return KERNELS if name.startswith(KERNELS_PREFIX) and name != KERNELS_PREFIX else None
