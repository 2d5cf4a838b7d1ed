"""The kinds of plugins. Each is an entry-point group `tokenspeed.<kind>`."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_PREFIX = "tokenspeed."
KERNELS_PREFIX = "kernels."  # kernels.<op family>; the family may come from a plugin's ops

COMMANDS = {
    "bench": "tokenspeed-bench",
    "chat": "tokenspeed-chat",
    "env": "tokenspeed-plugin-tools",
    "plugins": "tokenspeed-plugin-tools",
    "run-batch": "tokenspeed-server",
    "serve": "tokenspeed-server",
}
"""The commands of the default distributions."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin. `api` is the contract number; entries declare theirs as `value [api1]`.

    `selected_by` is the flag that takes the entries' names. With `is_unique`, two distributions must not
    use the same name. `built_in` names are reserved for default distributions. With `is_default_only`,
    entries of other distributions are ignored.
    """

    api: int = 1
    selected_by: str = ""
    is_unique: bool = True
    built_in: tuple[str, ...] = ()
    is_default_only: bool = False


_KERNELS = Kind(selected_by="--kernel-backend")
KINDS: dict[str, Kind] = {
    "kernels.attention": Kind(selected_by="--attention-backend"),
    "kernels.moe": Kind(selected_by="--moe-backend"),
    "kernels.sampling": Kind(selected_by="--sampling-backend"),
    "grammars": Kind(selected_by="--grammar-backend"),
    "drafters": Kind(selected_by="--speculative-algorithm"),
    "logits_processors": Kind(),
    "models": Kind(),
    "load_formats": Kind(selected_by="--load-format"),
    "quantization": Kind(selected_by="--quantization"),
    "checkpoints": Kind(),
    "ops": Kind(),
    "rankings": Kind(is_default_only=True),
    "hooks": Kind(is_unique=False),
    "preflight": Kind(is_default_only=True),
    "commands": Kind(built_in=tuple(COMMANDS)),
    "executors": Kind(selected_by="--distributed-executor-backend", built_in=("local",)),
    "policies": Kind(selected_by="--schedule-policy", built_in=("fcfs", "priority")),
    "tool_parsers": Kind(selected_by="--tool-call-parser"),
    "reasoning_parsers": Kind(selected_by="--reasoning-parser"),
}


def kind_of(name: str) -> Kind | None:
    """Return the kind of that name, or None if it is unknown. `kernels.<family>` is always known."""
    if name in KINDS:
        return KINDS[name]
    return _KERNELS if name.startswith(KERNELS_PREFIX) and name != KERNELS_PREFIX else None
