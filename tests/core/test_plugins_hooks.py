"""Hooks of plugins: settings, observers, middleware and failures."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from made_plugins import Install, discover

from tokenspeed_core.api import RequestRecord, StepRecord, hookimpl
from tokenspeed_core.config import Config
from tokenspeed_core.config.sources import load
from tokenspeed_core.errors import PluginError
from tokenspeed_core.plugins import Status
from tokenspeed_core.plugins.hooks import Hooks

STEP = StepRecord(step_id=1, num_rows=2, num_decodes=1, num_tokens=9, duration=0.01)
REQUEST = RequestRecord("r", 3, 0, 4, "stop", 0.1, 0.2)


def plugin(**functions: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: hookimpl(function) for name, function in functions.items()})


def registered(*, is_required: bool = False, **plugins: SimpleNamespace) -> Hooks:
    hooks = Hooks()
    for name, each in plugins.items():
        hooks.register(each, name, is_required=is_required)
    return hooks


def failing(error: BaseException) -> dict[str, SimpleNamespace]:
    """Return a plugin for each hook that runs at start, which raises there."""

    def adjust_config(config: Config) -> None:
        raise error

    def add_middleware(app: Any) -> None:
        raise error

    return {
        "adjust_config": plugin(adjust_config=adjust_config),
        "add_middleware": plugin(add_middleware=add_middleware),
    }


def call(hooks: Hooks, hook: str) -> Any:
    """Call a hook that runs at start."""
    return getattr(hooks, hook)(Config() if hook == "adjust_config" else print)


def test_plugin_changes_only_unset_settings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    hooks = registered(one=plugin(adjust_config=lambda config: {"max_num_seqs": 4}))
    config = hooks.adjust_config(Config())
    assert config.max_num_seqs == 4
    assert config.origin("max_num_seqs") == "plugin one"
    assert caplog.messages == ["plugin one set --max-num-seqs"]


def test_settings_of_the_user_stay(caplog: pytest.LogCaptureFixture) -> None:
    hooks = registered(one=plugin(adjust_config=lambda config: {"max_num_seqs": 4, "seed": 5}))
    config = hooks.adjust_config(load(Config, {"max_num_seqs": "9"}, {}))
    assert (config.max_num_seqs, config.seed) == (9, 5)
    assert "one" in caplog.text
    assert "--max-num-seqs" in caplog.text


def test_later_plugins_cannot_undo_changes() -> None:
    seen = []

    def second(config: Config) -> dict[str, Any] | None:
        seen.append(config.max_num_seqs)
        return {"max_num_seqs": 5}

    hooks = registered(
        one=plugin(adjust_config=lambda config: {"max_num_seqs": 4}),
        two=plugin(adjust_config=second),
    )
    assert hooks.adjust_config(Config()).max_num_seqs == 4
    assert seen == [4]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_seqs": 1}, "--max-seqs"),
        ({"no_plugins": True}, "--no-plugins"),
        ({"strict_plugins": True}, "--strict-plugins"),
        ({"plugins_lock": "lock.json"}, "--plugins-lock"),
    ],
)
def test_invalid_changes_are_dropped_together(
    changes: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = plugin(adjust_config=lambda config: {"seed": 5, **changes})
    good = plugin(adjust_config=lambda config: {"block_size": 8})
    config = registered(mine=bad, other=good).adjust_config(Config())
    assert (config.seed, config.block_size) == (0, 8)
    assert named in caplog.text
    with pytest.raises(PluginError, match=rf"mine.*{named}"):
        registered(is_required=True, mine=bad).adjust_config(Config())


@pytest.mark.parametrize("hook", ["adjust_config", "add_middleware"])
@pytest.mark.parametrize("error", [RuntimeError("no disk"), SystemExit(3)])
def test_failing_hook_is_switched_off(
    error: BaseException, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = registered(bad=failing(error)[hook])
    call(hooks, hook)
    call(hooks, hook)
    assert caplog.text.count("Traceback") == 1
    with pytest.raises(PluginError, match=rf"{hook} of bad.*{type(error).__name__}"):
        call(registered(is_required=True, bad=failing(error)[hook]), hook)


@pytest.mark.parametrize("hook", ["adjust_config", "add_middleware"])
@pytest.mark.parametrize(
    ("named", "strict"), [("acme", False), ("acme:hooks:tune", False), (None, True)]
)
def test_failing_hook_of_a_named_plugin_ends_the_start(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    named: str | None,
    strict: bool,
) -> None:
    found = install("acme", "[tokenspeed.hooks]\ntune = acme_hooks [api1]\n")
    module = ModuleType("acme_hooks")
    vars(module).update(vars(failing(RuntimeError("no disk"))[hook]))
    monkeypatch.setitem(sys.modules, "acme_hooks", module)
    call(Hooks.load(discover(found)), hook)
    with pytest.raises(PluginError) as caught:
        call(Hooks.load(discover(found, named, strict=strict)), hook)
    message = str(caught.value)
    assert "no disk" in message
    assert "TOKENSPEED_PLUGINS=-acme:hooks" in message
    assert "\n" not in message


def test_middleware_that_returns_no_app_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    assert registered(bad=plugin(add_middleware=lambda app: "app")).add_middleware(print) is print
    assert "ASGI" in caplog.text


def test_middleware_wraps_in_order() -> None:
    hooks = registered(
        one=plugin(add_middleware=lambda app: lambda: f"one({app()})"),
        two=plugin(add_middleware=lambda app: None),
        three=plugin(add_middleware=lambda app: lambda: f"three({app()})"),
    )
    assert hooks.add_middleware(lambda: "app")() == "three(one(app))"
    assert registered().add_middleware(print) is print


def test_module_with_an_unknown_hook_is_left_out(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = install("odd", "[tokenspeed.hooks]\nodd = odd_hooks [api1]\n")
    module = ModuleType("odd_hooks")
    module.observe_steps = hookimpl(lambda record: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "odd_hooks", module)
    catalog = discover(found)
    assert Hooks.load(catalog).observer("observe_step") is None
    assert [entry.status for entry in catalog.all()] == [Status.FAILED]
    with pytest.raises(PluginError, match="observe_steps"):
        Hooks.load(discover(found, strict=True))


@pytest.mark.parametrize("error", [RuntimeError("no disk"), SystemExit("no disk")])
def test_failing_observer_is_switched_off(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[StepRecord] = []

    def fail(record: StepRecord) -> None:
        raise error

    hooks = registered(
        bad=plugin(observe_step=fail), good=plugin(observe_step=lambda record: seen.append(record))
    )
    observe = hooks.observer("observe_step")
    assert observe is not None
    observe(STEP)
    observe(STEP)
    assert seen == [STEP, STEP]
    assert len(caplog.records) == 1
    assert "no disk" in caplog.text


def test_observer_exists_only_for_implemented_hooks() -> None:
    seen: list[RequestRecord] = []
    hooks = registered(one=plugin(observe_request=lambda record: seen.append(record)))
    assert hooks.observer("observe_step") is None
    observe = hooks.observer("observe_request")
    assert observe is not None
    observe(REQUEST)
    assert seen == [REQUEST]


def test_unknown_hooks_and_arguments_are_refused() -> None:
    with pytest.raises(PluginError, match="hooks of mine"):
        registered(mine=plugin(observe_steps=lambda record: None))
    with pytest.raises(PluginError, match="hooks of mine"):
        registered(mine=plugin(observe_step=lambda record, surplus: None))
