"""The kinds of plugins, each an entry-point group `tokenspeed.<kind>` with an api number."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_PREFIX = "tokenspeed."
KERNELS_PREFIX = "kernels."  # kernels.<op family>; a plugin may bring families unknown to the core


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin. `api` is the contract's number; entries name theirs as `value [api1]`.

    `is_named`: users type the entries' names, so two distributions must not claim the same one, nor one
    that is `built_in`. `is_used`: this core asks for such plugins; kernels of a family for which it has no op
    are used where a plugin brings `ops`.
    """

    api: int
    text: str
    is_named: bool = True
    is_used: bool = True
    built_in: tuple[str, ...] = ()


KERNELS = Kind(1, "implementations of an op family, by backend name")
KERNELS_WITHOUT_OPS = Kind(1, "implementations of an op family that a plugin brings", is_used=False)
KINDS: dict[str, Kind] = {
    "kernels.attention": KERNELS,
    "kernels.mla": KERNELS_WITHOUT_OPS,
    "kernels.cache": KERNELS,
    "kernels.norm": KERNELS,
    "kernels.rope": KERNELS,
    "kernels.activation": KERNELS,
    "kernels.linear": KERNELS,
    "kernels.moe": KERNELS,
    "kernels.sampling": KERNELS,
    "kernels.comm": KERNELS_WITHOUT_OPS,
    "models": Kind(1, "model families, by the architectures name of config.json"),
    "load_formats": Kind(1, "ways to read weights, for --load-format"),
    "checkpoints": Kind(1, "names for checkpoints in packages"),
    "ops": Kind(1, "op contracts"),
    "hooks": Kind(1, "behaviour: modules of hook implementations", is_named=False),
    "commands": Kind(1, "subcommands of tokenspeed"),
    "policies": Kind(1, "scheduling policies, for --schedule-policy", built_in=("fcfs", "priority")),
    "platforms": Kind(1, "kinds of device", is_used=False),
    "executors": Kind(1, "ways to run workers", is_used=False),
    "tokenizers": Kind(1, "tokenizers", is_used=False),
    "tool_parsers": Kind(1, "parsers of tool calls", is_used=False),
    "reasoning_parsers": Kind(1, "parsers of reasoning", is_used=False),
    "quantization": Kind(1, "quantization methods", is_used=False),
    "apis": Kind(1, "dialects of HTTP", is_used=False),
    "grammar": Kind(1, "grammar engines", is_used=False),
    "drafters": Kind(1, "speculative drafters", is_used=False),
    "kv_stores": Kind(1, "stores behind the KV cache", is_used=False),
}


def kind_of(name: str) -> Kind | None:
    """Return the kind of that name, or None where the core knows no such kind."""
    if name in KINDS:
        return KINDS[name]
    return KERNELS_WITHOUT_OPS if name.startswith(KERNELS_PREFIX) and name != KERNELS_PREFIX else None
