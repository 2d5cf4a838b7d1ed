"""Draw docs/assets/benchmarks.svg: TokenSpeed and vLLM, from figures in benchmarks/RESULTS.md."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).parents[2] / "docs" / "assets" / "benchmarks.svg"
ROWS = (  # workload, unit, TokenSpeed, vLLM 0.26, whether lower is better
    ("Qwen3-8B BF16, one user", "ms per token", 4.01, 5.23, True),
    ("Qwen3-8B BF16, batch of 256", "output tokens/s", 10326, 9462, False),
    ("Qwen3-8B BF16, prefill", "prompt tokens/s", 41105, 40415, False),
    ("Qwen3-8B BF16, 32 agents", "seconds", 6.85, 8.56, True),
    ("Qwen3-8B FP8, batch of 256", "output tokens/s", 14101, 12322, False),
    ("Qwen3-0.6B over HTTP, 256 users", "output tokens/s", 50428, 18301, False),
)
WIDTH, ROW_HEIGHT, LEFT, BAR_WIDTH = 860, 62, 290, 430
OURS, THEIRS = "#2563eb", "#9ca3af"


def bar(x: float, y: float, width: float, color: str, label: str) -> str:
    """Return one horizontal bar with its value."""
    return (
        f'<rect x="{x}" y="{y}" width="{width:.1f}" height="16" rx="2" fill="{color}"/>'
        f'<text x="{x + width + 8:.1f}" y="{y + 13}">{label}</text>'
    )


def chart() -> str:
    """Return the chart as SVG. Each row is scaled to its larger value."""
    height = 70 + ROW_HEIGHT * len(ROWS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#111827">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff" rx="8"/>',
        f'<rect x="{LEFT}" y="20" width="12" height="12" fill="{OURS}"/>',
        f'<text x="{LEFT + 18}" y="31">TokenSpeed</text>',
        f'<rect x="{LEFT + 120}" y="20" width="12" height="12" fill="{THEIRS}"/>',
        f'<text x="{LEFT + 138}" y="31">vLLM 0.26.0, one NVIDIA H200</text>',
    ]
    for index, (workload, unit, ours, theirs, is_lower_better) in enumerate(ROWS):
        y = 54 + index * ROW_HEIGHT
        scale = BAR_WIDTH / max(ours, theirs)
        better = "lower is better" if is_lower_better else "higher is better"
        parts += [
            f'<text x="20" y="{y + 13}" font-weight="600">{workload}</text>',
            f'<text x="20" y="{y + 31}" fill="#6b7280">{unit}, {better}</text>',
            bar(LEFT, y, ours * scale, OURS, f"{ours:,}"),
            bar(LEFT, y + 20, theirs * scale, THEIRS, f"{theirs:,}"),
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PATH.write_text(chart(), encoding="utf-8")
