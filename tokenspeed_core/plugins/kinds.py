"""The kinds of plugins, each an entry-point group `tokenspeed.<kind>` with an api number."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_PREFIX = "tokenspeed."
KERNELS_PREFIX = "kernels."  # kernels.<op family>; a plugin may bring families unknown to the core


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin. `api` is the contract's number; entries name theirs as `value [api1]`.

    `is_named`: users type the entries' names, so two distributions must not claim the same one, nor one
    that is `built_in`, unless they are default ones. `is_used`: this core asks for such plugins; kernels of a family
    for which it has no op are used where a plugin brings `ops`. `is_default_only`: no others are asked.
    """

    api: int
    is_named: bool = True
    is_used: bool = True
    built_in: tuple[str, ...] = ()
    is_default_only: bool = False


KERNELS = Kind(1)  # implementations of an op family, by backend name
UNUSED = Kind(1, is_used=False)
_OF_PLUGINS = (
    "norm",
    "rope",
    "activation",
    "linear",
    "moe",
    "mla",
    "comm",
)  # families whose ops plugins bring
# Kinds that later cores will use: devices, ways to run workers, tokenizers, HTTP dialects, grammars that guide replies,
# drafters that speculate, stores behind the KV cache.
_TO_COME = ("platforms", "executors", "tokenizers", "apis", "grammar", "drafters", "kv_stores")
KINDS: dict[str, Kind] = {
    **{f"{KERNELS_PREFIX}{family}": KERNELS for family in ("attention", "cache", "sampling")},
    **{f"{KERNELS_PREFIX}{family}": UNUSED for family in _OF_PLUGINS},
    "models": Kind(1),  # model families, by the architectures name of config.json
    "load_formats": Kind(1),  # ways to read weights, for --load-format
    "quantization": Kind(1),  # methods, for --quantization
    "checkpoints": Kind(1),  # names for checkpoints in packages
    "ops": Kind(1),  # op contracts
    "rankings": Kind(1, is_default_only=True),  # which backends were measured to be the fastest
    "hooks": Kind(1, is_named=False),  # behaviour: modules of hook implementations
    "locks": Kind(1, is_named=False, is_default_only=True),  # readers of plugins.lock
    "commands": Kind(
        1, built_in=("serve", "chat", "plugins", "env", "bench")
    ),  # subcommands of tokenspeed
    "policies": Kind(
        1, built_in=("fcfs", "priority")
    ),  # scheduling policies, for --schedule-policy
    "tool_parsers": Kind(1),  # of replies, for --tool-call-parser
    "reasoning_parsers": Kind(1),  # of replies, for --reasoning-parser
    **dict.fromkeys(_TO_COME, UNUSED),
}


def kind_of(name: str) -> Kind | None:
    """Return the kind of that name, or None where the core knows no such kind."""
    if name in KINDS:
        return KINDS[name]
    return UNUSED if name.startswith(KERNELS_PREFIX) and name != KERNELS_PREFIX else None
