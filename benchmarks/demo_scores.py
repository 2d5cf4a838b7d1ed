"""Score the demo models with every backend of attention, latent attention and experts.

    python benchmarks/demo_scores.py [--items 200] [--seconds 110]

Lists backends that cannot run here with the reason. Runs with reference kernels, which use eager steps and loop over
rows, and the run with one sequence at a time get a tenth of the items. No run starts after `--seconds`. The exit status
is 1 if a score is below the required share, or if a run failed or was left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tokenspeed_demo.items import REQUIRED, Item, held_out_set
from tokenspeed_demo.render import Renderer
from tokenspeed_demo.score import MAX_TOKENS, is_right

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.checkpoint.resolve import resolve_checkpoint
from tokenspeed_core.config import Config
from tokenspeed_core.errors import SelectionError
from tokenspeed_core.plugins.catalog import Catalog

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 128,
    "max_total_tokens": 65536,
    "chunked_prefill_size": 1024,
    "cudagraph_capture_sizes": (1, 32, 128),
}


@dataclass(frozen=True, slots=True)
class Run:
    """A model with keywords of `LLM`. With `is_short` it answers a tenth of the items."""

    model: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    is_short: bool = False


def references(flag: str, **settings: Any) -> dict[str, Any]:
    """Return keywords that select the reference kernels with a flag."""
    return {flag: "torch", "enforce_eager": True, **settings}


MLA, DENSE = "demo-deepseek", "demo"
RUNS = (
    Run(MLA, "triton", {"attention_backend": "triton", "moe_backend": "triton"}),
    Run(MLA, "MLA torch", references("attention_backend"), is_short=True),
    Run(MLA, "experts torch", references("moe_backend"), is_short=True),
    # The experts of a step with one token have other kernels.
    Run(MLA, "1 sequence", {"max_num_seqs": 1, "moe_backend": "triton"}, is_short=True),
    Run(MLA, "FP8 cache", {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "triton"}),
    Run(MLA, "FP8 experts", {"quantization": "fp8", "moe_backend": "triton"}),
    Run(MLA, "FP8 torch", references("moe_backend", quantization="fp8"), is_short=True),
    Run(MLA, "INT8 experts", {"quantization": "w8a8_int8", "moe_backend": "triton"}),
    Run(DENSE, "triton", {"attention_backend": "triton"}),
    Run(DENSE, "fa3", {"attention_backend": "fa3"}),
    Run(DENSE, "flashinfer", {"attention_backend": "flashinfer"}),
    Run(DENSE, "attention torch", references("attention_backend"), is_short=True),
    Run(DENSE, "FP8 cache", {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "triton"}),
    Run(DENSE, "block-wise FP8", {"quantization": "fp8-block"}),
    Run(
        DENSE,
        "deepgemm",
        {"quantization": "fp8-block", "kernel_backend": {"linear_fp8_block": "deepgemm"}},
    ),
)


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [f"{run.model}: {run.name}" for run in RUNS]
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=names,
        default=names,
        metavar="MODEL: NAME",
        help="runs (default: all)",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=list(REQUIRED),
        default=list(REQUIRED),
        help="tasks (default: all)",
    )
    parser.add_argument("--items", type=int, default=200, help="items of each task")
    parser.add_argument("--device", default="cuda", help="device of the models")
    parser.add_argument("--seconds", type=float, default=110, help="start no run after this time")
    options = parser.parse_args()
    begin, num_failed = time.perf_counter(), 0
    tasks = "".join(f"{task[:10]:>11}" for task in options.tasks)
    print(f"{'model':14}{'run':16}{'items':>6}{tasks}{'seconds':>9}")
    for run in RUNS:
        line = f"{run.model:14}{run.name:16}"
        if f"{run.model}: {run.name}" not in options.runs:
            continue
        if time.perf_counter() - begin > options.seconds:
            print(f"{line} left out after {options.seconds:.0f} s")
            num_failed += 1
            continue
        num_items = max(1, options.items // 10) if run.is_short else options.items
        items = [item for task in options.tasks for item in held_out_set(task, num_items)]
        started = time.perf_counter()
        try:
            shares, kernels = score(run, options.device, items)
        except SelectionError as error:
            print(f"{line} cannot run: {why(run, error)}", flush=True)
            continue
        except Exception as error:
            print(f"{line} FAILED: {type(error).__name__}: {error!s:.500}", flush=True)
            num_failed += 1
            continue
        below = [task for task, share in shares.items() if share < REQUIRED[task]]
        num_failed += bool(below)
        columns = "".join(f"{share:11.1%}" for share in shares.values())
        seconds = time.perf_counter() - started
        print(f"{line}{num_items:6}{columns}{seconds:9.1f}")
        print(f"{'':14}{kernels}", flush=True)
        if below:
            print(f"{'':14}below the required share: {', '.join(below)}", flush=True)
    print(f"finished after {time.perf_counter() - begin:.0f} s; {num_failed} failed or left out")
    sys.exit(bool(num_failed))


def score(run: Run, device: str, items: Sequence[Item]) -> tuple[dict[str, float], str]:
    """Return the share of exact answers of each task, and the kernels of attention and experts.

    Raises SelectionError if a requested backend cannot run.
    """
    path = resolve_checkpoint(Config(model=run.model), Catalog.discover()).path
    renderer = Renderer(path / "chat_template.jinja")
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(run.model, device=device, **SETTINGS | run.settings) as llm:
        assert llm.tokenizer is not None
        encode = partial(llm.tokenizer.encode, add_special_tokens=False)
        prompts = [{"prompt_token_ids": encode(renderer.prompt(item)).tolist()} for item in items]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        ops = [*llm.kernel_plan.find("attention"), *llm.kernel_plan.find("moe")]
    right: dict[str, list[bool]] = {}
    for item, output in zip(items, outputs, strict=True):
        right.setdefault(item.task, []).append(is_right(item, output.outputs[0].text or ""))
    shares = {task: sum(found) / len(found) for task, found in right.items()}
    return shares, ", ".join(dict.fromkeys(f"{op.op} {op.backend}" for op in ops))


def why(run: Run, error: SelectionError) -> str:
    """Return the line of an error that is about the requested backend, or its first."""
    lines = str(error).splitlines()
    about = (line.strip() for line in lines[1:] if line.strip().partition(" ")[0] == run.name)
    return next(about, lines[0])


if __name__ == "__main__":
    main()
