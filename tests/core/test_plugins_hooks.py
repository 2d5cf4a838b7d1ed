"""Hooks: what a plugin may change and see, and what happens when it misbehaves."""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tokenspeed_core.api import RequestRecord, StepRecord, hookimpl
from tokenspeed_core.api.hooks import hookspec
from tokenspeed_core.config import Config
from tokenspeed_core.config.sources import load
from tokenspeed_core.errors import ConfigError, PluginError
from tokenspeed_core.plugins import Catalog, Selection, Status
from tokenspeed_core.plugins.hooks import Hooks

STEP = StepRecord(step_id=1, num_rows=2, num_decodes=1, num_tokens=9, duration=0.01)
REQUEST = RequestRecord("r", 3, 0, 4, "stop", 0.1, 0.2)


def plugin(**functions: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: hookimpl(function) for name, function in functions.items()})


def registered(*, strict: bool = False, **plugins: SimpleNamespace) -> Hooks:
    hooks = Hooks(strict=strict)
    for name, each in plugins.items():
        hooks.register(each, name)
    return hooks


def adjust(hooks: Hooks, config: Config) -> Config:
    with hooks.adjusted(config) as adjusted:
        return adjusted


def test_a_plugin_changes_what_the_user_left_open_and_the_origin_names_it() -> None:
    hooks = registered(one=plugin(adjust_config=lambda config: {"max_num_seqs": 4}))
    config = adjust(hooks, Config())
    assert config.max_num_seqs == 4
    assert config.origin("max_num_seqs") == "plugin one"


def test_what_the_user_set_stays_and_the_plugin_is_named(caplog: pytest.LogCaptureFixture) -> None:
    hooks = registered(one=plugin(adjust_config=lambda config: {"max_num_seqs": 4, "seed": 5}))
    config = adjust(hooks, load({"max_num_seqs": "9"}, {}))
    assert (config.max_num_seqs, config.seed) == (9, 5)
    assert caplog.messages == [
        "plugin one would change max_num_seqs, which --max-num-seqs sets: left"
    ]


def test_each_plugin_sees_what_the_ones_before_it_decided_and_may_not_undo_it() -> None:
    seen = []

    def second(config: Config) -> dict[str, Any] | None:
        seen.append(config.max_num_seqs)
        return {"max_num_seqs": 5}

    hooks = registered(
        one=plugin(adjust_config=lambda config: {"max_num_seqs": 4}),
        two=plugin(adjust_config=second),
    )
    assert adjust(hooks, Config()).max_num_seqs == 4
    assert seen == [4]


def test_a_plugin_that_wants_nothing_changes_nothing() -> None:
    config = Config(max_num_seqs=3)
    assert adjust(
        registered(one=plugin(adjust_config=lambda config: None)), config
    ).model_dump() == (config.model_dump())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_num_seqs": 0}, "must be at least 1"),
        ({"max_seqs": 1}, "did you mean"),
        *(
            ({name: value}, f"{name} says which plugins are used")
            for name, value in (
                ("no_plugins", True),
                ("strict_plugins", True),
                ("plugins_lock", "lock.json"),
            )
        ),
    ],
)
def test_of_a_plugin_with_a_bad_change_nothing_is_taken_and_a_strict_start_ends_in_its_name(
    changes: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = (
        plugin(adjust_config=lambda config: {"seed": 5, **changes}),
        plugin(adjust_config=lambda config: {"block_size": 8}),
    )
    config = adjust(registered(mine=bad, other=good), Config())
    assert (config.seed, config.block_size) == (0, 8)
    assert expected in caplog.text
    assert caplog.messages == ["hooks of mine failed in adjust_config and are switched off"]
    with pytest.raises(PluginError, match=r"(hooks of|plugin) mine") as caught:
        adjust(registered(strict=True, mine=bad), Config())
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said", "added"),
    [
        (
            {"max_model_len": 9},
            "--max-model-len 9: toy was made for 8 tokens; give at most that",
            "--max-model-len",
        ),
        (
            {"tool_call_parser": "nope"},
            "no tool_parsers named 'nope'; none is installed",
            "--tool-call-parser",
        ),
        ({"host": "nowhere"}, "cannot listen on nowhere:80: no; see --port and --host", "--host"),
        (
            {"max_num_seqs": 3},
            "too small; fewer --max-num-seqs, or less --chunked-prefill-size",
            "--max-num-seqs",
        ),
        ({"max_num_seqs": 3}, "--max-model-len 9: toy was made for 8 tokens", None),
        ({"attention_backend": "x"}, "--attention-backend (from plugin acme:tune): no", None),
    ],
)
@pytest.mark.parametrize("selected", [None, "acme,other"])
def test_an_error_about_what_a_plugin_set_names_the_plugin_and_what_goes_without_its_changes(
    changes: dict[str, Any],
    said: str,
    added: str | None,
    selected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TOKENSPEED_PLUGINS", raising=False)
    if selected:
        monkeypatch.setenv("TOKENSPEED_PLUGINS", selected)
    hooks = registered(**{"acme:tune": plugin(adjust_config=lambda config: changes)})
    out = f"TOKENSPEED_PLUGINS={selected + ',' if selected else ''}-acme:hooks"
    blame = f"; plugin acme:tune set {added}: give your own, or {out} goes without its changes"
    with pytest.raises(ConfigError) as caught, hooks.adjusted(load({"port": "80"}, {})):
        raise ConfigError(said)
    assert str(caught.value) == said + (blame if added else "")
    own = {name: str(value) for name, value in changes.items()}
    with (
        pytest.raises(ConfigError) as caught,
        hooks.adjusted(load(own, {})),
    ):  # what the user set is the user's
        raise ConfigError(said)
    assert str(caught.value) == said


def test_of_several_settings_of_a_plugin_each_that_an_error_names_is_told() -> None:
    hooks = registered(
        acme=plugin(adjust_config=lambda config: {"max_num_seqs": 3, "seed": 1, "block_size": 8})
    )
    with pytest.raises(ConfigError) as caught, hooks.adjusted(Config()):
        raise ConfigError("lower --max-num-seqs (or `--block-size`)")
    assert "; plugin acme set --max-num-seqs: " in str(caught.value)
    assert "; plugin acme set --block-size: " in str(caught.value)
    assert "--seed" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("no disk"), SystemExit(3)])
def test_a_plugin_that_raises_at_the_start_is_switched_off_and_ends_a_strict_one(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**arguments: Any) -> None:
        raise error

    def adjust_config(config: Config) -> None:
        fail()

    def add_middleware(app: Any) -> None:
        fail()

    config = Config()
    assert adjust(registered(bad=plugin(adjust_config=adjust_config)), config) is config
    assert registered(bad=plugin(add_middleware=add_middleware)).add_middleware(print) is print
    assert caplog.text.count("Traceback") == 2
    with pytest.raises(
        PluginError, match=f"hooks of bad failed in adjust_config: {type(error).__name__}"
    ):
        adjust(registered(strict=True, bad=plugin(adjust_config=adjust_config)), config)
    with pytest.raises(PluginError, match="hooks of bad failed in add_middleware"):
        registered(strict=True, bad=plugin(add_middleware=add_middleware)).add_middleware(print)


def test_middleware_that_is_no_app_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert registered(bad=plugin(add_middleware=lambda app: "app")).add_middleware(print) is print
    assert "a str is no ASGI app" in caplog.text


def test_a_module_with_an_unknown_hook_is_left_out_and_ends_a_strict_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tokenspeed.hooks]\nodd = odd_hooks [api1]\n")
    module = ModuleType("odd_hooks")
    module.observe_steps = hookimpl(lambda record: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "odd_hooks", module)

    def catalog(strict: bool) -> Catalog:
        return Catalog.discover(
            Selection.read({}), strict=strict, distributions=distributions(path=[str(tmp_path)])
        )

    lenient = catalog(strict=False)
    assert Hooks.load(lenient).observer("observe_step") is None
    assert [entry.status for entry in lenient.all()] == [Status.FAILED]
    with pytest.raises(PluginError, match="observe_steps"):
        Hooks.load(catalog(strict=True))


@pytest.mark.parametrize("error", [RuntimeError("no disk"), SystemExit("no disk")])
def test_an_observer_that_fails_is_switched_off_and_the_others_go_on(
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
    assert [record.message for record in caplog.records] == [
        "hooks of bad failed in observe_step and are switched off"
    ]
    assert "no disk" in caplog.text


def test_records_are_wanted_only_where_somebody_observes() -> None:
    seen: list[RequestRecord] = []
    hooks = registered(one=plugin(observe_request=lambda record: seen.append(record)))
    assert hooks.observer("observe_step") is None
    observe = hooks.observer("observe_request")
    assert observe is not None
    observe(REQUEST)
    assert seen == [REQUEST]


def test_middleware_wraps_in_order_and_a_plugin_may_leave_the_app_as_it_is() -> None:
    hooks = registered(
        one=plugin(add_middleware=lambda app: lambda: f"one({app()})"),
        two=plugin(add_middleware=lambda app: None),
        three=plugin(add_middleware=lambda app: lambda: f"three({app()})"),
    )
    assert hooks.add_middleware(lambda: "app")() == "three(one(app))"
    assert registered().add_middleware(print) is print


def test_a_hook_and_an_argument_of_one_that_are_to_go_warn_whoever_implements_and_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Specs:
        @hookspec(warn_on_impl=FutureWarning("old goes with 0.4; use new"))
        def old(self, record: Any) -> None: ...

        @hookspec(warn_on_impl_args={"past": FutureWarning("past goes with 0.4; use record")})
        def new(self, record: Any, past: Any) -> None: ...

    monkeypatch.setattr("tokenspeed_core.plugins.hooks.hookspecs", Specs())
    with pytest.warns(FutureWarning, match=r"old goes with 0\.4; use new"):
        registered(mine=plugin(old=lambda record: None))
    with pytest.warns(FutureWarning, match=r"past goes with 0\.4; use record"):
        registered(mine=plugin(new=lambda record, past: None))
    with warnings.catch_warnings(action="error"):
        registered(mine=plugin(new=lambda record: None))


def test_a_hook_that_does_not_exist_or_takes_other_arguments_is_refused() -> None:
    with pytest.raises(PluginError, match="hooks of mine"):
        registered(mine=plugin(observe_steps=lambda record: None))
    with pytest.raises(PluginError, match="hooks of mine"):
        registered(mine=plugin(observe_step=lambda record, surplus: None))
