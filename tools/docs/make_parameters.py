"""Write docs/parameters.md from the configuration."""

from __future__ import annotations

from pathlib import Path

from tokenspeed_core.config.describe import as_written, bounds
from tokenspeed_core.config.schema import SECTIONS, Config, flag, is_switch, metadata


def page() -> str:
    """Return the parameter page, in Markdown."""
    lines = [
        "# Parameters",
        "",
        "Generated from `tokenspeed_core/config/schema.py` by `python tools/docs/make_parameters.py`.",
        "",
        "Every setting is a flag of `tokenspeed serve`, a variable `TOKENSPEED_<SETTING>`, a key of the YAML file",
        "of `--config`, and a keyword of `tokenspeed_core.LLM`. Flags win over variables, and variables over the file.",
        "",
        "Some settings have keys, such as `--attention-backend.decode`. In a variable the key follows two underscores",
        "(`TOKENSPEED_ATTENTION_BACKEND__DECODE`), in a file it is `attention_backend: {decode: NAME}`. A setting",
        "also overrides the keys of weaker sources.",
    ]
    for section, title in SECTIONS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| flag | takes | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [
            _row(name) for name in Config.model_fields if metadata(name)["section"] == section
        ]
    return "\n".join(lines) + "\n"


def _row(name: str) -> str:
    field = Config.model_fields[name]
    forms = [flag(name), *(f"{flag(name)}.{key}" for key in metadata(name)["narrow"])]
    if name.startswith("enable_"):
        forms.append(f"--no-{flag(name)[2:]}")
    takes = "" if is_switch(name) else f"`{bounds(name)}`".replace("|", "\\|")
    shown = ", ".join(f"`{form}`" for form in forms)
    return f"| {shown} | {takes} | {as_written(field.default)} | {field.description} |"


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs/parameters.md").write_text(page(), encoding="utf-8")
