"""`tokenspeed bench anchors`: all rows, each group in a process with empty caches."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenspeed_bench import files, supervised
from tokenspeed_bench import result as results
from tokenspeed_bench.baselines import DEVICE, GROUPS, ROWS, Row
from tokenspeed_bench.console import Console, warn
from tokenspeed_bench.errors import INTERRUPTED, BenchError
from tokenspeed_bench.finish import finish
from tokenspeed_bench.options import parse
from tokenspeed_bench.result import runs_of
from tokenspeed_bench.signals import deferred_interrupts
from tokenspeed_bench.table import of_rows

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("all", "--shape", "qwen3-8b"),
    "fp8": (
        "all",
        "--shape",
        "qwen3-8b",
        "--quantization",
        "fp8",
        "--traffic",
        "latency,throughput,prefill",
    ),
    "http": ("serve", "--shape", "qwen3-0.6b"),
    "moe": ("all", "--shape", "qwen3-30b-a3b"),
    "mla": ("all", "--shape", "deepseek-v2-lite"),
    "tp": ("all", "--shape", "qwen3-32b", "--tensor-parallel-size", "2"),
}
CACHES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "XDG_CACHE_HOME",
    "CUDA_CACHE_PATH",
)  # of compiled code
MIN_EVENT_SHARE = 0.99  # streamed events, of tokens
MAX_FIRST_OVER_MEDIAN = 1.5  # the first request's time to first token


def measure(words: Sequence[str]) -> int:
    """Measure the chosen groups, print the table and failed conditions; return the exit status."""
    options, others = parse("anchors", words)
    if options.model is not None:
        raise BenchError(f"{options.model}: anchors measures fixed models. Remove the model.")
    groups = options.groups.split(",")
    for group in groups:
        if group not in GROUPS:
            raise BenchError(f"--groups {group}: unknown; available: {', '.join(GROUPS)}")
    traces = [str(Path(options.profiles, group)) for group in groups if options.profiles]
    files.check_writable(options.json, options.plot, *traces)
    console = Console(options.json)
    whole = results.new("anchors", "", None, {})
    if DEVICE not in str(whole["gpus"]):
        warn(
            f"the targets were measured on {DEVICE}s, but this machine has {whole['gpus'] or 'no GPU'}. The models "
            "have billions of weights. Press Ctrl-C to stop; `tokenspeed bench all` measures any model."
        )
    del whole["runs"]
    whole["results"] = parts = []
    failures: dict[str, str] = {}
    for group in groups:
        try:
            part, status = measure_group(group, options.repeats, options.profiles, others, console)
        except KeyboardInterrupt:
            whole["is_interrupted"] = True
            break
        if part is not None:
            parts.append({**part, "group": group})
        if status == INTERRUPTED:
            whole["is_interrupted"] = True
            break
        if status:
            failures[group] = (
                f"`tokenspeed bench {' '.join(COMMANDS[group])}` ended with status {status}"
            )
    whole["device"] = next((part["device"] for part in parts if part["device"]), None)
    found = [_value(row, parts, failures) for row in ROWS if row.group in groups]
    whole["rows"] = [_described(*each) for each in found]
    with deferred_interrupts():
        console.say("\n".join((of_rows(found), *failed_conditions(whole))))
        return finish(
            whole, options.json, options.plot, (), has_failed=bool(failures) or console.is_lost
        )


def measure_group(
    group: str, repeats: int, profiles: str | None, others: Sequence[str], console: Console
) -> tuple[dict[str, Any] | None, int]:
    """Run the command of a group in a process with empty caches; return its result, if any, and status."""
    command = [*COMMANDS[group], *others]
    if command[0] != "serve":
        command += ["--repeats", str(repeats)]
    if profiles:
        command += ["--profile", str(Path(profiles, f"{group}.json"))]
    console.say(f"== tokenspeed bench {' '.join(command)}")
    with tempfile.TemporaryDirectory(prefix="tokenspeed-bench-") as folder:
        path = Path(folder, "result.json")
        environ = {**os.environ, **{name: str(Path(folder, name.lower())) for name in CACHES}}
        with supervised.start(
            ["bench", *command, "--json", str(path)], env=environ, stdout=console.stream
        ) as child:
            status = _wait(child)
        return (files.read(str(path)) if path.is_file() else None), status


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for a child. It receives Ctrl-C as well, and then writes its results."""
    try:
        return child.wait()
    except KeyboardInterrupt as end:
        with deferred_interrupts():  # a second Ctrl-C reaches the child too
            for number in end.args:
                child.send_signal(number)
            child.wait()
        return INTERRUPTED


def _value(
    row: Row, parts: Sequence[Mapping[str, Any]], failures: Mapping[str, str]
) -> tuple[Row, float | None, str]:
    """Return a row with its figure, or with the reason for a missing one."""
    for part in parts:
        for run in part["runs"]:
            if (
                part["group"] == row.group
                and run["traffic"] == row.traffic
                and row.metric in run["figures"]
                and run.get("pace", {}).get("users") == row.users
                and not run.get("is_part")
            ):
                return row, float(run["figures"][row.metric]), ""
    return row, None, failures.get(row.group, "not measured")


def _described(row: Row, value: float | None, why: str) -> dict[str, Any]:
    return {
        "row": row.name(),
        "group": row.group,
        "metric": row.metric,
        "peer": row.peer,
        "must": row.must,
        "aim": row.aim,
        "floor": row.floor,
        "value": value,
        "ratio": None if value is None else row.ratio(value),
        "verdict": why if value is None else row.verdict(value),
    }


def failed_conditions(whole: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each condition that failed."""
    if DEVICE not in str(whole["device"]):
        yield f"condition not met: measured on {whole['device']}, but the targets are for {DEVICE}s"
    for part, run in runs_of(whole):
        figures, name = run["figures"], f"{part['shape']} {run['traffic']['name']}"
        share, ratio = figures.get("event_share"), figures.get("first_over_median")
        if share is not None and share < MIN_EVENT_SHARE:
            yield f"condition not met: {name}: {100 * share:.1f} % of tokens had their own event, need 99 %"
        if ratio is not None and ratio > MAX_FIRST_OVER_MEDIAN:
            yield f"condition not met: {name}: the first request took {ratio:.2f} times the median to its first token, limit 1.5"
        if figures.get("failed"):
            yield f"condition not met: {name}: {figures['failed']} requests failed"
