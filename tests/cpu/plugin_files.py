"""Write the files of an installed plugin distribution."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import tokenspeed_models

ACME_MOE = "AcmeMoeForCausalLM"


def write_plugin(
    site: Path, name: str, kind: str, entries: Mapping[str, str], modules: Mapping[str, str]
) -> None:
    """Write version 1.0 of a distribution with entry points of one kind, and its modules."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{entry} = {target}\n" for entry, target in entries.items()]
    (info / "entry_points.txt").write_text(f"[tokenspeed.{kind}]\n{''.join(lines)}")
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)


def write_acme_moe(site: Path) -> None:
    """Write the plugin of a third-party family, ACME_MOE, which copies Qwen3-MoE.

    `plugins new moe acme` writes a module `acme_moe`, so its modules have other names.
    """
    package = Path(tokenspeed_models.__file__).parent
    spec = f"""
        from tokenspeed_core.api import ModelSpec

        SPEC = ModelSpec(
            architecture="{ACME_MOE}",
            describe="acme_family_describe:describe_qwen3_moe",
            load="acme_family_model:{ACME_MOE}",
        )
    """
    copies = {"describe": "describe.py", "model": "families/qwen3_moe.py"}
    modules = {"acme_family": dedent(spec)}
    for name, file in copies.items():
        source = (package / file).read_text().replace("Qwen3MoeForCausalLM", ACME_MOE)
        modules[f"acme_family_{name}"] = source.replace(
            "tokenspeed_models.describe", "acme_family_describe"
        )
    write_plugin(site, "acme-family", "models", {ACME_MOE: "acme_family:SPEC [api1]"}, modules)
