"""Hooks: what a plugin may change and see, and what happens when it misbehaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed_core.api import RequestRecord, StepRecord, hookimpl
from tokenspeed_core.config import Config
from tokenspeed_core.config.sources import load
from tokenspeed_core.errors import ConfigError, PluginError
from tokenspeed_core.plugins.hooks import Hooks

STEP = StepRecord(step_id=1, num_rows=2, num_decodes=1, num_tokens=9, duration=0.01)
REQUEST = RequestRecord("r", 3, 0, 4, "stop", 0.1, 0.2)


def plugin(**functions: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: hookimpl(function) for name, function in functions.items()})


def registered(**plugins: SimpleNamespace) -> Hooks:
    hooks = Hooks()
    for name, each in plugins.items():
        hooks.register(each, name)
    return hooks


def test_a_plugin_changes_what_the_user_left_open_and_the_origin_names_it() -> None:
    hooks = registered(one=plugin(adjust_config=lambda config: {"max_num_seqs": 4}))
    config = hooks.adjust(Config())
    assert config.max_num_seqs == 4
    assert config.origin("max_num_seqs") == "plugin one"


def test_what_the_user_set_stays_and_the_plugin_is_named(caplog: pytest.LogCaptureFixture) -> None:
    hooks = registered(one=plugin(adjust_config=lambda config: {"max_num_seqs": 4, "seed": 5}))
    config = hooks.adjust(load({"max_num_seqs": "9"}, {}))
    assert (config.max_num_seqs, config.seed) == (9, 5)
    assert caplog.messages == ["plugin one would change max_num_seqs, which --max-num-seqs sets: left"]


def test_each_plugin_sees_what_the_ones_before_it_decided_and_may_not_undo_it() -> None:
    seen = []

    def second(config: Config) -> dict[str, Any] | None:
        seen.append(config.max_num_seqs)
        return {"max_num_seqs": 5}

    hooks = registered(one=plugin(adjust_config=lambda config: {"max_num_seqs": 4}),
                       two=plugin(adjust_config=second))
    assert hooks.adjust(Config()).max_num_seqs == 4
    assert seen == [4]


def test_a_plugin_that_wants_nothing_changes_nothing() -> None:
    config = Config(max_num_seqs=3)
    assert registered(one=plugin(adjust_config=lambda config: None)).adjust(config).model_dump() == (
        config.model_dump()
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"max_num_seqs": 0}, "must be at least 1"), ({"max_seqs": 1}, "did you mean")],
)
def test_a_plugins_bad_change_is_refused_in_its_name(changes: dict[str, Any], expected: str) -> None:
    hooks = registered(mine=plugin(adjust_config=lambda config: changes))
    with pytest.raises(ConfigError, match="plugin mine") as caught:
        hooks.adjust(Config())
    assert expected in str(caught.value)


def test_an_observer_that_fails_is_switched_off_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[StepRecord] = []

    def fail(record: StepRecord) -> None:
        raise RuntimeError("no disk")

    hooks = registered(bad=plugin(observe_step=fail), good=plugin(observe_step=lambda record: seen.append(record)))
    hooks.observe_step(STEP)
    hooks.observe_step(STEP)
    assert seen == [STEP, STEP]
    assert [record.message for record in caplog.records] == [
        "hooks of bad failed in observe_step and are switched off"
    ]
    assert "no disk" in caplog.text


def test_records_are_wanted_only_where_somebody_observes() -> None:
    seen: list[RequestRecord] = []
    hooks = registered(one=plugin(observe_request=lambda record: seen.append(record)))
    assert hooks.has("observe_request")
    assert not hooks.has("observe_step")
    hooks.observe_step(STEP)
    hooks.observe_request(REQUEST)
    assert seen == [REQUEST]


def test_middleware_wraps_in_order_and_a_plugin_may_leave_the_app_as_it_is() -> None:
    hooks = registered(one=plugin(add_middleware=lambda app: f"one({app})"),
                       two=plugin(add_middleware=lambda app: None),
                       three=plugin(add_middleware=lambda app: f"three({app})"))
    assert hooks.add_middleware("app") == "three(one(app))"
    assert registered().add_middleware("app") == "app"


def test_a_hook_that_does_not_exist_or_takes_other_arguments_is_refused() -> None:
    with pytest.raises(PluginError, match="hooks of mine"):
        registered(mine=plugin(observe_steps=lambda record: None))
    with pytest.raises(PluginError, match="hooks of mine"):
        registered(mine=plugin(observe_step=lambda record, surplus: None))
