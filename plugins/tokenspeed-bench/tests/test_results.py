"""Results: their content, comparison and plots."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tokenspeed_bench import files
from tokenspeed_bench import result as results
from tokenspeed_bench.baselines import HTTP_LOADS, ROWS, rows_of
from tokenspeed_bench.compare import compare
from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.metrics import Record, of_records, over_time
from tokenspeed_bench.plot import draw
from tokenspeed_bench.table import of_run
from tokenspeed_bench.traffic import load, of_workload

RED = "#d1495b"  # of the second curve
PLAN = {"platform": "NVIDIA H200", "ops": [{"family": "attention", "backend": "triton"}]}


def serve_result(scale: float = 1.0, users: int = 2) -> dict[str, Any]:
    records = [
        Record(
            i * 0.1,
            [i * 0.1 + scale * (0.05 + 0.01 * j) for j in range(10)],
            10,
            i * 0.1 + 0.2,
            20,
            5,
        )
        for i in range(12)
    ]
    result = results.new("serve", "m", None, {"api_key": "secret", "seed": "1"})
    results.add_plan(result, PLAN)
    figures = of_records(records, {"ttft": 55.0})
    results.add_run(
        result,
        load(12, 20, 10, is_fixed=True).describe(),
        figures,
        pace={"users": users, "rate": None, "procs": 2},
        goals={"ttft": 55.0},
        failures={},
        series=over_time(records),
        client={"users": 2, "beat_ms": 5.0, "events_per_s": 400.0, "itl_p99_ms": 5.1},
    )
    return result


def offline_result(
    seconds: float = 2.0, shape: str | None = "qwen3-8b", **settings: Any
) -> dict[str, Any]:
    result = results.new("offline", "m", shape, settings)
    results.add_plan(result, PLAN)
    figures = {
        "s": seconds,
        "output_tokens": 256,
        "prompt_tokens": 128,
        "cached_tokens": 0,
        "uncached_tokens": 128,
        "out_per_s": 256 / seconds,
        "prompt_per_s": 128 / seconds,
        "ms_per_output": 1e3 * seconds / 256,
    }
    results.add_run(result, {"name": "start"}, {"s": 20.0})
    results.add_run(
        result, of_workload("latency").describe(), figures, repeats_s=[seconds, seconds * 1.1]
    )
    return result


def test_result_has_context_but_no_key() -> None:
    result = json.loads(json.dumps(serve_result()))
    assert result["schema"] == results.SCHEMA
    assert set(result) == {
        "schema",
        "kind",
        "created",
        "command",
        "model",
        "shape",
        "settings",
        "device",
        "gpus",
        "machine",
        "versions",
        "commit",
        "environment",
        "kernel_plan",
        "backends",
        "is_interrupted",
        "runs",
    }
    assert result["settings"] == {"seed": "1"}
    assert {"python", "tokenspeed-core", "tokenspeed-bench"} <= result["versions"].keys()
    assert "secret" not in json.dumps(result)


def test_versions_cover_plugins_and_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, script = (
        "[tokenspeed.kernels.attention]\nacme = acme_flash:SPEC\n",
        "[console_scripts]\na = b:c\n",
    )
    for name, entries in (
        ("acme_flash", kernels),
        ("flashinfer_python", ""),
        ("acme_else", script),
    ):
        folder = tmp_path / f"{name}-1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (folder / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = results.versions()
    assert {name: found.get(name) for name in ("acme-flash", "flashinfer-python", "acme-else")} == {
        "acme-flash": "1.2",
        "flashinfer-python": "1.2",
        "acme-else": None,
    }


def test_unfused_op_adds_no_backend() -> None:
    result = results.new("offline", "m", None, {})
    parts = [{"family": "cache", "backend": name} for name in ("", "torch")]
    results.add_plan(result, {**PLAN, "ops": parts})
    assert result["backends"] == {"cache": ["torch"]}


def test_api_key_is_masked_in_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv",
        ["x", "bench", "serve", "--api-key", "secret", "--api-key=secret", "--users", "2"],
    )
    monkeypatch.setenv("TOKENSPEED_API_KEY", "secret")
    result = results.new("serve", "m", None, {})
    assert result["command"] == [
        "tokenspeed",
        "bench",
        "serve",
        "--api-key",
        "***",
        "--api-key=***",
        "--users",
        "2",
    ]
    assert "secret" not in json.dumps(result)


def test_known_row_has_floor_and_ratio() -> None:
    run = offline_result(seconds=1.28)["runs"][1]
    assert run["floors"] == {"ms_per_output": {"floor": 3.37, "ratio": round(5.0 / 3.37, 3)}}
    assert "floor of ms_per_output: 3.37, 1.48 times" in of_run(run)


@pytest.mark.parametrize(
    "changed",
    [{"shape": "qwen3-0.6b"}, {"shape": None}, {"quantization": "fp4"}],
    ids=lambda changed: str(changed),
)
def test_other_models_have_no_floor(changed: dict[str, Any]) -> None:
    assert offline_result(**changed)["runs"][1]["floors"] == {}


def test_other_devices_and_lengths_have_no_floor() -> None:
    result = offline_result()
    (row,) = rows_of(result, result["runs"][1])
    assert row.name() == "qwen3-8b latency"
    assert rows_of({**result, "device": "CPU (2 threads)"}, result["runs"][1]) == ()
    longer = {**result["runs"][1], "traffic": of_workload("latency", in_len=129).describe()}
    assert rows_of(result, longer) == []


def test_rows_of_two_gpus_need_two_processes() -> None:
    result = {**offline_result(), "shape": "qwen3-32b"}
    assert rows_of(result, result["runs"][1]) == []
    result["settings"] = {"tensor_parallel_size": "2"}
    (row,) = rows_of(result, result["runs"][1])
    assert (row.group, row.must) == ("tp", 8.9)


def test_ratio_is_one_at_the_lower_bound() -> None:
    for row in ROWS:
        if row.floor is not None:
            assert row.ratio(row.floor) == 1.0
            assert row.ratio(row.floor * 2) == (0.5 if row.is_rate() else 2.0)


def test_rows_have_unique_names_and_ordered_targets() -> None:
    assert len({(row.name(), row.metric) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        goals = [goal for goal in (row.peer, row.must, row.aim, row.floor) if goal is not None]
        assert goals == sorted(goals, reverse=not row.is_rate()), row
    assert {row.verdict(row.must) for row in ROWS if row.must} == {"must"}
    assert {row.verdict(row.peer) for row in ROWS if row.must and row.peer} == {"MISSED"}


def test_http_rows_match_the_default_loads() -> None:
    sent = {
        load(r, n, HTTP_LOADS["out_len"][0], is_fixed=False).describe()["requests"]: u
        for u, r, n in zip(
            HTTP_LOADS["users"], HTTP_LOADS["requests"], HTTP_LOADS["in_len"], strict=True
        )
    }
    rows = {row.traffic["requests"]: row.users for row in ROWS if row.traffic["name"] == "load"}
    assert rows == sent


def test_comparison_shows_changes_and_differences() -> None:
    before, after = offline_result(2.0), offline_result(1.5, seed="3")
    after["versions"] = {**after["versions"], "torch": "99"}
    text = compare(before, after, ("a.json", "b.json"))
    assert re.search(r"latency +s +2 +1\.5 +-25\.0 % +better", text)
    assert re.search(r" out_per_s +128 +170\.667 +\+33\.3 % +better", text)
    assert 'differs: settings: {} -> {"seed": "3"}' in text
    assert re.search(r"differs: torch: .* -> 99", text)
    assert "worse" in compare(after, before, ("b.json", "a.json"))


def test_different_traffic_is_refused_in_one_line() -> None:
    other = copy.deepcopy(offline_result())
    other["runs"][1]["traffic"]["in_len"] = 999
    with pytest.raises(
        BenchError, match=r"different traffic: latency \(in_len 128, out_len 256\) and .*999"
    ) as got:
        compare(offline_result(), other, ("a.json", "b.json"))
    assert "\n" not in str(got.value)


def test_other_number_of_users_is_other_traffic() -> None:
    with pytest.raises(BenchError, match="different traffic"):
        compare(serve_result(users=2), serve_result(users=3), ("a", "b"))


def test_different_goals_skip_goodput() -> None:
    with_goals, without = serve_result(), serve_result(scale=2.0)
    without["runs"][0]["goals"] = {}
    for name in ("good_share", "good_per_s"):
        del without["runs"][0]["figures"][name]
    text = compare(with_goals, without, ("a", "b"))
    assert "ttft_p50_ms" in text
    assert 'users 2): {"ttft": 55.0} -> {}' in text
    other = serve_result()
    other["runs"][0]["goals"] = {"ttft": 60.0}
    assert "good_share" not in compare(with_goals, other, ("a", "b"))
    assert "good_share" in compare(with_goals, serve_result(), ("a", "b"))


def test_unmatched_runs_are_named() -> None:
    more = offline_result()
    results.add_run(more, of_workload("prefill").describe(), {"s": 3.0})
    text = compare(more, offline_result(), ("a.json", "b.json"))
    assert "only in a.json: prefill (in_len 4096, num_requests 64, out_len 1)" in text


def test_interrupted_load_is_not_compared() -> None:
    part = serve_result()
    part["runs"][0]["is_part"] = True
    with pytest.raises(BenchError, match="different traffic"):
        compare(part, serve_result(), ("a", "b"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not JSON"),
        ("[]", r"x\.json"),
        ('{"a": 1}', r"x\.json"),
        ('{"schema": 99, "runs": []}', "has schema 99"),
        ('{"schema": 1, "kind": "serve", "runs": null}', "kind"),
        ('{"schema": 1, "runs": []}', "kind"),
        (
            '{"schema": 1, "kind": "serve", "runs": [{}]}',
            r"runs\[0\]",
        ),
        (
            '{"schema": 1, "kind": "serve", "runs": [{"traffic": {"name": "x"}, "figures": {"s": "y"}}]}',
            r"runs\[0\]",
        ),
        (
            '{"schema": 1, "kind": "serve", "runs": [{"traffic": {"name": "x"}, "figures": {}, "pace": 3}]}',
            r"runs\[0\]",
        ),
        ('{"schema": 1, "kind": "serve", "runs": [], "versions": []}', "versions"),
        ('{"schema": 1, "results": {}}', "results"),
        ('{"schema": 1, "results": [{"kind": "serve", "runs": [3]}]}', r"runs\[0\]"),
    ],
)
def test_invalid_result_file_is_refused(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(BenchError, match=named):
        files.read(str(tmp_path / "x.json"))


def test_unwritable_file_is_refused_early(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "x.json"):
        with pytest.raises(BenchError, match="file"):
            files.check_writable(str(path))
    files.check_writable(None, "-", str(tmp_path / "x.json"))


def test_result_survives_writing_and_reading(tmp_path: Path) -> None:
    result, path = serve_result(), str(tmp_path / "x.json")
    files.write_result(result, path)
    assert files.read(path) == json.loads(json.dumps(result))


@pytest.mark.parametrize(
    "result",
    [
        serve_result(),
        offline_result(),
        {"schema": 1, "results": [serve_result(), offline_result()]},
    ],
    ids=["serve", "offline", "anchors"],
)
def test_plot_is_svg_with_panels_inside(result: dict[str, Any]) -> None:
    root = ElementTree.fromstring(draw(result))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    panels = [each for each in root if each.tag.endswith("}g")]
    assert panels
    for panel in panels:
        x, y = map(float, re.findall(r"[\d.]+", panel.attrib["transform"]))
        for each in panel:
            places = (
                re.findall(r"[\d.]+", each.attrib["d"])
                if each.tag.endswith("}path")
                else [each.attrib[name] for name in ("x", "cx", "x1") if name in each.attrib]
            )
            assert all(0 <= x + float(place) <= width for place in places[::2])
            heights = [each.attrib[name] for name in ("y", "cy", "y1") if name in each.attrib]
            assert all(0 <= y + float(place) <= height for place in heights)


def test_isolated_gap_is_drawn() -> None:
    result = serve_result()
    series = result["runs"][0]["series"]
    series["itl_p99_ms"] = [None, 73.3, None, 5.0, 6.0, *[None] * 115]
    root = ElementTree.fromstring(draw(result))
    panel = next(
        each
        for each in root.iter()
        if any("gaps between tokens" in (child.text or "") for child in each)
    )
    heights = [
        float(each.attrib["cy"])
        for each in panel
        if each.tag.endswith("}circle") and each.get("fill") == RED
    ]
    assert len(heights) == 1
    assert heights[0] < 60, "the gap sets the top of the axis"


def test_several_loads_give_latency_by_throughput() -> None:
    titles = re.findall(r">([^<]+) by throughput<", draw(serve_result()))
    assert titles == []
    both = serve_result()
    both["runs"] += serve_result(scale=2.0, users=4)["runs"]
    drawn = draw(both)
    assert [
        title.partition(": ")[2] for title in re.findall(r">([^<]+) by throughput<", drawn)
    ] == [
        "first token",
        "gap between tokens",
    ]
    root = ElementTree.fromstring(drawn)
    panel = next(
        each for each in root.iter() if any("by throughput" in (child.text or "") for child in each)
    )
    lines = [each.attrib["d"] for each in panel if each.tag.endswith("}path")]
    assert [len(re.findall(r"[ML]", line)) for line in lines] == [2, 2]


def test_percentiles_are_not_joined() -> None:
    root = ElementTree.fromstring(draw(serve_result()))
    panel = next(
        each for each in root.iter() if any("percentiles" in (child.text or "") for child in each)
    )
    assert not [each for each in panel if each.tag.endswith("}path")]
    assert len([each for each in panel if each.tag.endswith("}circle")]) == 8


def test_curve_names_do_not_overlap() -> None:
    root = ElementTree.fromstring(draw(serve_result()))
    panel = next(
        each for each in root.iter() if any("percentiles" in (child.text or "") for child in each)
    )
    first, second = sorted(
        float(each.attrib["x"]) for each in panel if each.text in ("first token", "between tokens")
    )
    assert second - first > len("between tokens") * 6


def test_plot_escapes_the_model_name() -> None:
    result = offline_result(shape=None)
    result["model"] = "<script>&"
    ElementTree.fromstring(draw(result))
    assert "<script>" not in draw(result)


def test_result_without_traffic_is_not_plotted() -> None:
    result = results.new("offline", "m", None, {})
    with pytest.raises(BenchError, match="nothing to plot"):
        draw(result)


def test_text_shows_all_figures() -> None:
    text = of_run(serve_result()["runs"][0])
    for part in (
        "2 users",
        "tokens/s",
        "events for 100.0 %",
        "first token:",
        "between tokens:",
        "180 computed",
        "60 from the cache",
        "goodput (ttft:55): 100.0 %",
        "the client alone",
    ):
        assert part in text
