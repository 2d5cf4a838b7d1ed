"""Command-line options of `tokenspeed bench`, converted to traffic and load options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tokenspeed_bench.baselines import GROUPS, HTTP_LOADS
from tokenspeed_bench.client import LoadOptions
from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.flags import check_spelling
from tokenspeed_bench.metrics import GOALS
from tokenspeed_bench.online import Load
from tokenspeed_bench.shapes import SHAPES
from tokenspeed_bench.traffic import WORKLOADS, AgentShape, Traffic, agents, load, of_workload

OFFLINE = (*WORKLOADS, "agents")
ALSO_SERVE_FLAGS = ("--api-key", "--help")  # options that are flags of `tokenspeed serve` as well
NUMBERS = {  # options for lengths and counts, with the parameter's name for each kind of traffic
    "requests": {"throughput": "num_requests", "prefill": "num_requests", "load": "num_requests"},
    "input_len": {
        "latency": "in_len",
        "throughput": "in_len",
        "prefill": "in_len",
        "load": "in_len",
    },
    "output_len": dict.fromkeys((*OFFLINE, "load"), "out_len"),
    "sessions": dict.fromkeys(("agentic", "agents"), "num_sessions"),
    "turns": {"agentic": "num_turns", "agents": "turns"},
    "shared_len": {"agentic": "system_len", "agents": "shared_len"},
    "first_len": {"agents": "first_len"},
    "turn_len": {"agentic": "observation_len", "agents": "turn_len"},
    "pause_scale": {"agents": "pause_scale"},
}
TEXTS = {
    "requests": "how many requests",
    "input_len": "tokens of a prompt",
    "output_len": "tokens of an answer",
    "sessions": "how many agents",
    "turns": "turns of an agent",
    "shared_len": "tokens that all agents' prompts share",
    "first_len": "tokens of an agent's first prompt",
    "turn_len": "tokens that a turn adds",
    "pause_scale": "factor for all pauses between the turns of an agent",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises BenchError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise BenchError(f"{message}; `{self.prog} --help` shows the options")


def whole(text: str) -> int:
    """Parse an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def numbers(text: str) -> list[int]:
    """Parse `64` or `1,64,256`."""
    return [whole(part) for part in text.split(",")]


def positive(text: str) -> float:
    """Parse a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def svg(text: str) -> str:
    """Check the name of a plot."""
    if Path(text).suffix.lower() not in ("", ".svg"):
        raise argparse.ArgumentTypeError(f"{text}: plots are SVG. Choose a name that ends in .svg.")
    return text


def goal(text: str) -> tuple[str, float]:
    """Parse a goal in milliseconds, such as `ttft:200`."""
    name, colon, value = text.partition(":")
    if name not in GOALS or not colon:
        raise argparse.ArgumentTypeError(
            f"{text}: must be NAME:MILLISECONDS with one of {', '.join(GOALS)}"
        )
    return name, positive(value)


for _read, _name in ((whole, "number"), (numbers, "list of numbers"), (positive, "number")):
    _read.__name__ = _name  # argparse's error messages use it


def parser_of(verb: str) -> Parser:
    """Return the parser of a subcommand's own options."""
    usage = f"tokenspeed bench {verb} [MODEL] [OPTIONS] [any flag of tokenspeed serve]"
    parser = Parser(prog=f"tokenspeed bench {verb}", usage=usage, allow_abbrev=False)
    files = parser.add_argument_group("files")
    files.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout")
    files.add_argument("--plot", type=svg, metavar="FILE.svg", help="plot the result as SVG")
    if verb != "anchors":
        parser.add_argument(
            "--shape",
            choices=sorted(SHAPES),
            help="use dummy weights of a known model instead of MODEL",
        )
    if verb in OFFLINE or verb in ("all", "anchors"):
        parser.add_argument(
            "--repeats", type=whole, default=3, help="number of runs; the best one counts (3)"
        )
    if verb in OFFLINE or verb == "all":
        files.add_argument(
            "--profile",
            metavar="FILE",
            help="run once more and write a Chrome trace; with several kinds of "
            "traffic, one file each, with the kind in its name",
        )
    if verb == "serve":
        files.add_argument(
            "--profile",
            metavar="FILE",
            help="send each load again to another server, and write a Chrome trace "
            "of some steps; with several loads, one file each, with the load's number and users in its name",
        )
    if verb == "anchors":
        files.add_argument("--profiles", metavar="FOLDER", help="write Chrome traces of all groups")
        parser.add_argument(
            "--groups", default="bf16,fp8,http", help=f"groups to measure, from {','.join(GROUPS)}"
        )
    if verb == "all":
        parser.add_argument(
            "--traffic",
            default=",".join(WORKLOADS),
            help=f"kinds of traffic, from {','.join(OFFLINE)}",
        )
    if verb == "serve":
        _add_serving(parser)
    kinds = {"serve": (*OFFLINE, "load"), "all": OFFLINE}.get(verb, (verb,))
    if verb == "agents":
        parser.epilog = "Pauses need a server: use `tokenspeed bench serve --traffic agents`."
    for name, names in NUMBERS.items():
        if any(kind in names for kind in kinds) and (name != "pause_scale" or verb == "serve"):
            _add_number(parser, name, is_list=verb == "serve" and "load" in names)
    return parser


def _add_number(parser: Parser, name: str, *, is_list: bool) -> None:
    takes: Any = positive if name == "pause_scale" else numbers if is_list else whole
    form = "N[,N...]" if takes is numbers else "X" if takes is positive else "N"
    parser.add_argument(_flag(name), type=takes, metavar=form, help=TEXTS[name])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add_serving(parser: Parser) -> None:
    parser.add_argument("--url", help="measure a running server; default: start one for MODEL")
    parser.add_argument(
        "--model-name", metavar="NAME", help="model name to request; default: the first one listed"
    )
    parser.add_argument("--api-key", metavar="KEY", help="bearer key; default: $TOKENSPEED_API_KEY")
    parser.add_argument(
        "--traffic", choices=("load", *OFFLINE), default="load", help="kind of traffic (load)"
    )
    parser.add_argument(
        "--users", type=numbers, metavar="N[,N...]", help="concurrent users; one load per number"
    )
    parser.add_argument(
        "--request-rate", type=positive, metavar="X", help="arrivals per second instead of users"
    )
    parser.add_argument(
        "--fixed",
        action="store_true",
        help="use equal lengths; by default they vary by up to 50 %%",
    )
    parser.add_argument("--procs", type=whole, default=8, help="number of client processes (8)")
    parser.add_argument(
        "--timeout", type=positive, default=600.0, help="timeout per request in seconds (600)"
    )
    parser.add_argument(
        "--goodput",
        type=goal,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help=f"goals of a good request: {', '.join(GOALS)}, in milliseconds",
    )
    parser.add_argument(
        "--no-client-cost", action="store_true", help="do not measure the client itself"
    )


def parse(verb: str, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return a subcommand's options, including the model, and the flags of serve. Raises BenchError."""
    parser = parser_of(verb)
    given = list(words)
    model = given.pop(0) if given and not given[0].startswith("-") else None
    options, others = parser.parse_known_args(given)
    for word in others:
        _check_flag(word.partition("=")[0], verb)
    check_spelling(others, _flags_of(verb), parser.prog)
    options.model = model
    if model is not None and getattr(options, "shape", None):
        raise BenchError(f"--shape {options.shape}: also given as {model}; give only one")
    return options, others


def _flags_of(verb: str) -> list[str]:
    actions = parser_of(verb)._actions
    return [each for action in actions for each in action.option_strings if each.startswith("--")]


def _check_flag(flag: str, verb: str) -> None:
    """Reject a flag of another subcommand with a specific message. Raises BenchError."""
    if flag == "--dry-run":
        raise BenchError("--dry-run: not available here; use `tokenspeed serve --dry-run`")
    name = flag.removeprefix("--").replace("-", "_")
    if flag.startswith("--") and name in NUMBERS and verb in OFFLINE:
        raise _does_not_apply(name, verb)
    takers = [each for each in (*OFFLINE, "all", "serve", "anchors") if flag in _flags_of(each)]
    if takers and flag not in ALSO_SERVE_FLAGS:
        raise BenchError(
            f"{flag}: not an option of `tokenspeed bench {verb}`; it belongs to {', '.join(takers)}"
        )


def traffic_of(kind: str, given: Mapping[str, int | float]) -> Traffic:
    """Return the traffic of a kind with the given numbers, by option. Raises BenchError."""
    named = {}
    for option, value in given.items():
        if kind not in NUMBERS[option]:
            raise _does_not_apply(option, kind)
        named[NUMBERS[option][kind]] = value
    if kind != "agents":
        return of_workload(kind, **{name: int(value) for name, value in named.items()})
    return agents(agent_shape(named))


def _does_not_apply(option: str, kind: str) -> BenchError:
    takes = ", ".join(_flag(name) for name, names in NUMBERS.items() if kind in names)
    return BenchError(f"{_flag(option)}: does not apply to {kind}, which takes {takes}")


def agent_shape(named: Mapping[str, Any]) -> AgentShape:
    """Return the agents' parameters. Raises BenchError if they contradict each other."""
    numbers_given = dict(named)
    turns = numbers_given.pop("turns", None)
    if turns is not None:
        numbers_given |= {"min_turns": turns, "max_turns": turns}
    if "first_len" in numbers_given and "shared_len" not in numbers_given:
        numbers_given["shared_len"] = numbers_given["first_len"] // 5
    shape = AgentShape(**numbers_given)
    if shape.shared_len >= shape.first_len:
        raise BenchError(
            f"--shared-len {shape.shared_len}: must be below --first-len {shape.first_len}"
        )
    return shape


def given_numbers(options: argparse.Namespace) -> dict[str, Any]:
    """Return the counts and lengths given on the command line."""
    return {name: value for name in NUMBERS if (value := getattr(options, name, None)) is not None}


def traffics_of(options: argparse.Namespace, kinds: Sequence[str]) -> list[Traffic]:
    """Return the traffics of an offline measurement. If there are several kinds, each uses its own options."""
    given = given_numbers(options)
    for kind in kinds:
        if kind not in OFFLINE:
            raise BenchError(f"--traffic {kind}: unknown; available: {', '.join(OFFLINE)}")
    if len(kinds) == 1:
        return [traffic_of(kinds[0], given)]
    return [
        traffic_of(kind, {name: value for name, value in given.items() if kind in NUMBERS[name]})
        for kind in kinds
    ]


def loads_of(options: argparse.Namespace) -> list[Load]:
    """Return the loads of an online measurement. Raises BenchError if list lengths differ."""
    rate = options.request_rate
    if rate is not None and options.users:
        raise BenchError("--request-rate cannot be combined with --users")
    if options.traffic != "load":
        return [_load_of(options, options.traffic)]
    wrong = [name for name in given_numbers(options) if "load" not in NUMBERS[name]]
    if wrong:
        raise BenchError(f"{_flag(wrong[0])}: does not apply to load; use --traffic agents")
    typed = {
        "users": options.users,
        "requests": options.requests,
        "in_len": options.input_len,
        "out_len": options.output_len,
    }
    lists: dict[str, Sequence[int]] = {name: tuple(value) for name, value in typed.items() if value}
    if not {"users", "requests"} & lists.keys() and rate is None:
        lists = HTTP_LOADS | lists
    lists.setdefault("in_len", (256,))
    lists.setdefault("out_len", (128,))
    lists.setdefault("users", (1,) if rate is None else lists.get("requests", (256,)))
    lists.setdefault(
        "requests", tuple(users * 8 for users in lists["users"]) if rate is None else lists["users"]
    )
    count = max(map(len, lists.values()))
    for name, values in lists.items():
        if len(values) not in (1, count):
            raise BenchError(
                f"{name}: {len(values)} numbers, but another option has {count}. Give 1 or {count}."
            )
    full = {
        name: list(values) * (count if len(values) == 1 else 1) for name, values in lists.items()
    }
    return [
        Load(
            load(requests, in_len, out_len, options.fixed),
            LoadOptions(users, rate, options.procs),
        )
        for users, requests, in_len, out_len in zip(
            full["users"], full["requests"], full["in_len"], full["out_len"], strict=True
        )
    ]


def _load_of(options: argparse.Namespace, kind: str) -> Load:
    given = {}
    for name, value in given_numbers(options).items():
        if isinstance(value, list) and len(value) > 1:
            raise BenchError(f"{_flag(name)}: give one number, or use --traffic load")
        given[name] = value[0] if isinstance(value, list) else value
    if options.fixed:
        raise BenchError(f"--fixed: not available for {kind}, which has fixed lengths")
    if options.users and len(options.users) > 1:
        raise BenchError("--users: give one number, or use --traffic load")
    traffic = traffic_of(kind, given)
    users = options.users[0] if options.users else len(traffic.sessions)
    return Load(traffic, LoadOptions(users, options.request_rate, options.procs))
