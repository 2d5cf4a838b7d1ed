"""The subcommands of `tokenspeed bench` and their output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tokenspeed_bench.errors import BenchError

if TYPE_CHECKING:
    from tokenspeed_bench.console import Console
    from tokenspeed_bench.online import Load
    from tokenspeed_bench.trace import Timeline
    from tokenspeed_bench.traffic import Traffic

HELP = """Usage: tokenspeed bench COMMAND [MODEL] [OPTIONS] [any flag of tokenspeed serve]

Measure MODEL: a path or a Hugging Face repo id; default: the bundled demo. --shape uses dummy weights of a known model.

In process:
  latency      one user: milliseconds per token
  throughput   256 prompts of 512 tokens, 256 output tokens each: output tokens per second
  prefill      64 prompts of 4096 tokens: prompt tokens per second
  agentic      32 agents of 6 turns with a shared prompt of 4096 tokens
  agents       coding agents: 50,000 tokens in the first turn, 800 more in each of 10 to 15 turns
  all          the first four, in one engine

Over HTTP:
  serve        a running server (--url), or one started for the measurement

  anchors      all rows of the result tables, with targets for one H200
  compare      A.json B.json: compare two results

`tokenspeed bench COMMAND --help` shows a command's options, `tokenspeed serve --help` the flags of serve.
"""
VERBS = (
    "latency",
    "throughput",
    "prefill",
    "agentic",
    "agents",
    "all",
    "serve",
    "anchors",
    "compare",
)


def bench(words: Sequence[str]) -> int:
    """Run a subcommand. Return 0, 1 if something was skipped or failed, or 130 after Ctrl-C."""
    if not words or words[0] in ("--help", "-h", "help"):
        print(HELP, end="")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        from difflib import get_close_matches

        near = get_close_matches(verb, VERBS, n=1)
        hint = f"Did you mean `{near[0]}`?" if near else f"Available: {', '.join(VERBS)}."
        raise BenchError(f"bench {verb}: unknown command. {hint}")
    if verb == "compare":
        return _compare(rest)
    if any(word in ("--help", "-h") for word in rest):
        from tokenspeed_bench.options import parser_of

        parser_of(verb).print_help()
        return 0
    from tokenspeed_bench import signals

    with signals.terminate_as_interrupt():
        return _measure(verb, rest)


def _measure(verb: str, words: Sequence[str]) -> int:
    if verb == "anchors":
        from tokenspeed_bench import targets

        return targets.measure(words)
    return _serve(words) if verb == "serve" else _offline(verb, words)


def _compare(words: Sequence[str]) -> int:
    from tokenspeed_bench.compare import compare
    from tokenspeed_bench.files import read

    if len(words) != 2 or any(word.startswith("-") for word in words):
        print("Usage: tokenspeed bench compare BEFORE.json AFTER.json")
        return 0 if any(word in ("--help", "-h") for word in words) else 2
    before, after = words
    print(compare(read(before), read(after), (before, after)))
    return 0


def _offline(verb: str, words: Sequence[str]) -> int:
    from tokenspeed_bench import files, offline, options, trace
    from tokenspeed_bench import result as results
    from tokenspeed_bench.console import Console
    from tokenspeed_bench.finish import finish, keep_partial_result
    from tokenspeed_bench.flags import keywords
    from tokenspeed_bench.signals import deferred_interrupts

    given, others = options.parse(verb, words)
    kinds = given.traffic.split(",") if verb == "all" else [verb]
    traffics = options.traffics_of(given, kinds)
    settings = keywords(others)
    profile: str | None = getattr(given, "profile", None)
    files.check_writable(given.json, given.plot, profile)
    console = Console(given.json)

    def record(name: str, work: Callable[[], object]) -> None:
        assert profile is not None
        path = profile if len(traffics) == 1 else trace.named(profile, name)
        timeline = trace.record(work, path)
        console.say(f"profile of {name}: {path}\n{timeline.text()}")

    if "config" in settings:
        raise BenchError("--config: only for `tokenspeed bench serve`. Give the settings as flags.")
    given.model = _chosen_model(given, settings.pop("model", None))
    settings = ({"load_format": "dummy"} if given.shape else {}) | settings
    result = results.new("offline", given.model or given.shape or "demo", given.shape, settings)
    problems: list[str] = []
    with _model(given, max(_max_tokens(each) for each in traffics)) as model:

        def make() -> offline.Engine:
            from tokenspeed_core import LLM

            return LLM(model, **settings)

        with keep_partial_result(result, problems):
            plan = offline.Offline(traffics, given.repeats)
            problems += offline.measure(
                make, plan, result, _printer(console), record if profile else None
            )
    with deferred_interrupts():
        _print_device(result, console)
        return finish(result, given.json, given.plot, problems, has_failed=console.is_lost)


def _serve(words: Sequence[str]) -> int:
    from tokenspeed_bench import files, online, options
    from tokenspeed_bench import result as results
    from tokenspeed_bench.connection import Target
    from tokenspeed_bench.console import Console
    from tokenspeed_bench.finish import finish, keep_partial_result
    from tokenspeed_bench.flags import keywords
    from tokenspeed_bench.server import Api, started
    from tokenspeed_bench.signals import deferred_interrupts
    from tokenspeed_core.commands.settings import key_for_server

    given, others = options.parse("serve", words)
    settings = keywords(others)
    loads = options.loads_of(given)
    model_name = _chosen_model(given, settings.get("model")) or given.shape or "demo"
    _check_server(given, settings)
    files.check_writable(given.json, given.plot, given.profile)
    console = Console(given.json)
    key = key_for_server(given.api_key)
    result = results.new("serve", model_name, given.shape, settings)

    def measure(api: Api, seconds: float | None) -> None:
        name = given.model_name or api.model()
        if given.url:
            result["model"], result["server"] = name, {"url": api.url}
        report = api.report()
        plan = online.Online(
            loads, dict(given.goodput), not given.no_client_cost, salts=bool(report)
        )
        if isinstance(report.get("kernel_plan"), dict):
            results.add_plan(result, report["kernel_plan"])
            result["plugins"] = report.get("plugins")
        if seconds is not None:
            _printer(console)(results.add_run(result, {"name": "start"}, {"s": round(seconds, 2)}))
        online.measure(Target(api.url, name, key, given.timeout), plan, result, _printer(console))

    problems: list[str] = []
    with keep_partial_result(result, problems):
        if given.url:
            measure(Api(given.url, key), None)
        else:
            with _model(given, max(_max_tokens(each.traffic) for each in loads)) as model:
                dummy = (
                    ["--load-format", "dummy"]
                    if given.shape and "load_format" not in settings
                    else []
                )
                is_named = given.shape is None or "served_model_name" in settings
                named = [] if is_named else ["--served-model-name", given.shape]
                arguments = [*([model] if model else []), *dummy, *named, *others]
                with started(arguments, key) as (api, seconds):
                    measure(api, seconds)
                if given.profile and not result["is_interrupted"]:
                    problems += _profile(arguments, key, given, loads, result, console)
    with deferred_interrupts():
        _print_device(result, console)
        failed = any(run.get("failures") for run in result["runs"])
        return finish(
            result, given.json, given.plot, problems, has_failed=failed or console.is_lost
        )


def _check_server(given: Any, settings: Mapping[str, Any]) -> None:
    """Reject options that do not apply to the chosen server. Raises BenchError."""
    if given.url and (given.model or given.shape or settings):
        raise BenchError(
            "--url measures a running server; remove MODEL, --shape and flags of serve"
        )
    if given.url and given.profile:
        raise BenchError(
            "--profile needs a server that bench starts. "
            "Remove --url, and give the model and its flags."
        )
    for name in {"host", "port"} & settings.keys():
        raise BenchError(
            f"--{name}: bench starts its own server on a free port; use --url for a running one"
        )


def _profile(
    arguments: Sequence[str],
    key: str | None,
    given: Any,
    loads: Sequence[Load],
    result: Mapping[str, Any],
    console: Console,
) -> list[str]:
    """Profile the loads on a separate server; return a message for each load without a trace."""
    from tokenspeed_bench import profiled

    def report(name: str, path: str, timeline: Timeline) -> None:
        console.say(f"profile of {name}: {path}\n{timeline.text()}")

    try:
        profiled.check_recorder(result.get("plugins"))
    except BenchError as error:
        return [f"no profile: {error}"]
    return profiled.take(
        arguments, key, profiled.Profile(loads, given.profile, given.timeout), report
    )


def _chosen_model(given: Any, flag: str | None) -> str | None:
    """Return the model given as argument or by --model. Raises BenchError if both or a shape are given."""
    if flag is not None and (given.model or given.shape):
        raise BenchError(
            f"--model {flag}: the model is also given as {given.model or given.shape}. Give only one."
        )
    return flag or given.model


@contextmanager
def _model(given: Any, longest: int) -> Iterator[str | None]:
    """Yield the model: the given name, or a temporary directory with the given shape."""
    if given.shape is None:
        yield given.model
        return
    import tempfile
    from pathlib import Path

    from tokenspeed_bench.shapes import write

    with tempfile.TemporaryDirectory(prefix="tokenspeed-bench-") as folder:
        yield str(write(given.shape, Path(folder), longest))


def _max_tokens(traffic: Traffic) -> int:
    return max(turn.end + turn.out_len for session in traffic.sessions for turn in session.turns)


def _printer(console: Console) -> Callable[[Mapping[str, Any]], None]:
    from tokenspeed_bench.table import of_run

    return lambda run: console.say(of_run(run))


def _print_device(result: Mapping[str, Any], console: Console) -> None:
    """Print the device and the kernels that ran."""
    if result["runs"]:
        used = "; ".join(
            f"{family} {', '.join(names)}" for family, names in (result["backends"] or {}).items()
        )
        console.say(f"on {result['device'] or 'an unknown device'}, kernels: {used or 'unknown'}")
