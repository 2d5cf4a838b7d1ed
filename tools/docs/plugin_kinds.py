"""What the page of plugins says of each kind: the prose that docs/make_plugins.py sets between what the code says."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_core import api
from tokenspeed_core.api import kernels as spec


def note(module: Any, name: str) -> str:
    """Return what the string under a module's constant says."""
    body = ast.parse(inspect.getsource(module)).body
    named = [isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name for node in body]
    text = body[named.index(True) + 1]
    assert isinstance(text, ast.Expr), f"nothing is said of {name}"
    return " ".join(str(ast.literal_eval(text.value)).split())


@dataclass(frozen=True, slots=True)
class About:
    """What the page says of a kind: what it is for, who chooses, and by subject what its author writes and is given."""

    purpose: str
    chosen: str
    subjects: dict[str, tuple[Any, ...]] = field(
        default_factory=dict
    )  # a sentence: the classes under it
    words: dict[str, str] = field(
        default_factory=dict
    )  # names that are no classes, and what they are


KERNELS = About(
    "Kernels of an op family. An entry's name is the *backend* that users type; its value is a KernelSpec or a tuple "
    "of them, one for each op that the backend computes.",
    "`--attention-backend`, `--moe-backend`, `--sampling-backend` and `--kernel-backend`, each with a list of names, "
    "and by `auto`",
    {
        "The value says what the kernel computes and where.": (api.KernelSpec, api.Capability),
        f"The words of `features`: {note(spec, 'FEATURES')}": (api.AxisLimit, api.PlatformInfo),
        "An attention kernel is made by an AttentionFactory, which its spec's `load` names, and prepared once a step "
        "for all layers.": (
            api.AttentionFactory,
            api.AttentionKernel,
            api.AttentionProblem,
            api.AttentionLimits,
            api.AttentionStep,
        ),
    },
)
ABOUT: dict[str, About] = {
    "models": About(
        "A model family. The entry's name is the one in `architectures` of config.json.",
        "the checkpoint",
        {
            "The value is a ModelSpec; what its `describe` returns is a ModelInfo.": (
                api.ModelSpec,
                api.ModelInfo,
            ),
            "A ModelInfo names the groups of what each sequence keeps, of one of these or of the author's own.": (
                api.CacheGroupSpec,
                api.FullAttention,
                api.SlidingWindow,
                api.RecurrentState,
            ),
            "`load` names a Model, which is given a BuildContext and gets from it all that computes.": (
                api.Model,
                api.BuildContext,
                api.AttentionCall,
                api.Rotation,
            ),
        },
    ),
    "load_formats": About(
        "A way to read weights.",
        "`--load-format NAME`, or by the files that are there",
        {
            "The value is a LoadFormat, whose `load` names a WeightReader.": (
                api.LoadFormat,
                api.WeightReader,
            )
        },
    ),
    "quantization": About(
        "A way to compute linear maps in fewer bits.",
        "`--quantization NAME`, or by the checkpoint",
        {"The value is a Quantization.": (api.Quantization,)},
    ),
    "checkpoints": About(
        "A name for a checkpoint in a package.",
        "`tokenspeed serve NAME`",
        {
            "The value is a Checkpoint; its `path` is a folder with config.json, weights and perhaps a tokenizer.": (
                api.Checkpoint,
            )
        },
    ),
    "ops": About(
        "Contracts of ops that the core does not know. The entry's name is for people.",
        "models, which ask for ops",
        {"The value is an OpContract or a tuple of them.": (api.OpContract, api.Tolerance)},
        {
            "Problem": "a mapping: the axes that a contract lists, and `dtype`. Kernels' factories are given one.",
            "DOTS": "the tolerances of ops that are sums of products, for each dtype of the inputs.",
        },
    ),
    "rankings": About(
        "Which backends a benchmark found to be the fastest. Of default distributions alone: no plugin ranks itself.",
        "`auto`",
        {
            "The value is a tuple of Rankings, or of AutoDistributions.": (
                api.Ranking,
                api.AutoDistribution,
            )
        },
    ),
    "hooks": About(
        "Behaviour beside the way of a token. A module with a hook that does not exist is left out, and said to be.",
        "nobody: every installed one is called",
        {
            "The value is a module whose functions are marked `@hookimpl`; [the hooks](#the-hooks) are below.": ()
        },
        {
            "hookimpl": "the decorator that marks a function as the implementation of the hook of its name."
        },
    ),
    "locks": About(
        "What writes and checks `plugins.lock`. Of default distributions alone: a stranger's entry is not asked.",
        "`--plugins-lock FILE`",
    ),
    "commands": About(
        "A subcommand.",
        "`tokenspeed NAME`",
        {
            "The value is a function that takes the words after its name and returns the exit status. Only "
            "[`tokenspeed_core.commands`](#for-commands-tokenspeed_corecommands) is there for it besides the api. What "
            "it raises is told in one line; `TOKENSPEED_LOG_LEVEL=debug` shows the traceback.": (),
            "`tokenspeed --help` shows the first sentence of the distribution's summary, or the one that begins with "
            "`NAME: `: of several commands write what each is, as `sing: Sing a song. dance: Dance on a table.`": (),
        },
    ),
    "policies": About(
        "A scheduling policy.",
        "`--schedule-policy NAME`",
        {
            "The value is a factory without parameters, which makes a Policy.": (api.Policy,),
            "It shares out a step among what runs, and lets in what waits. I32 and I64 are NumPy arrays of integers.": (
                api.View,
                api.Limits,
                api.Decision,
                api.Candidate,
                api.Room,
            ),
        },
    ),
    "tool_parsers": About(
        "What finds tool calls in a chat's reply, where the request offered tools. It reads the content that a "
        "reasoning parser leaves.",
        "`--tool-call-parser NAME`",
        {
            "The value is a ParserSpec, whose `load` makes a ReplyParser of a ParserContext.": (
                api.ParserSpec,
                api.ParserContext,
                api.ReplyParser,
                api.ReplyEvent,
            )
        },
    ),
    "reasoning_parsers": About(
        "What finds the reasoning in a chat's reply.",
        "`--reasoning-parser NAME`",
        {
            "The value is a ParserSpec, as that of [tool parsers](#tool-parsers-tokenspeedtool_parsers-api1).": ()
        },
    ),
}
# Constants and types that `tokenspeed_core.commands` lists: nothing in the code can say it beside each.
LISTED = {
    "DEPRECATED": "what is on its way out, by name: since when, until when, and what replaces it.",
    "KINDS": "every kind by name: its `api`, whether names are typed, used, built in.",
    "DEFAULTS": "the default distributions, by exact name: tokenspeed-core and those of tokenspeed-core[default]; they "
    "stay without plugins.",
    "VARIABLE": "the environment variable that selects plugins.",
    "ConfigFile": "the type of a parameter that is `--config FILE`.",
    "ModelArgument": "the type of a parameter that is the model, named without a flag.",
    "Overview": "what `print_help` says of a command: usage, what it does, options of its own.",
}
