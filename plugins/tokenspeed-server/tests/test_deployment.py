"""The files in deploy/: they parse, and fit the server's routes, settings and metrics."""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_engine import make_stats
from prometheus_client.parser import text_string_to_metric_families as parse
from tokenspeed_server.metrics import MetricsMemory
from tokenspeed_server.observability import Observability
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core.config.settings import flag
from tokenspeed_core.engine.messages import Heartbeat

pytestmark = pytest.mark.tree

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "tokenspeed.json"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def check_settings(words: list[str], variables: list[str]) -> None:
    """Check that flags and TOKENSPEED_ variables are settings."""
    flags = {flag(name) for name in ServerConfig.model_fields}
    assert {word for word in words if word.startswith("--")} <= flags
    for variable in variables:
        if variable.startswith("TOKENSPEED_") and variable != "TOKENSPEED_CONFIG":
            assert variable.removeprefix("TOKENSPEED_").lower() in ServerConfig.model_fields


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def families() -> dict[str, set[str]]:
    """Return the samples of each metric that the server has."""
    observability = Observability.with_metrics(MetricsMemory(1), 0, "demo", has_prometheus=True)
    observability.note_heartbeat(0, Heartbeat(1, 0, 0, False, make_stats()))
    assert observability.prometheus is not None
    page, _ = observability.prometheus.page()
    return {
        family.name: {sample.name for sample in family.samples} for family in parse(page.decode())
    }


def test_dashboard_draws_every_metric_and_no_other() -> None:
    known = families()
    used: set[str] = set()
    for panel in panels():
        for target in panel["targets"]:
            names = set(re.findall(r"tokenspeed:\w+", target["expr"]))
            assert names, panel["title"]
            used |= names
    assert used <= {name for names in known.values() for name in names}
    missing = [family for family, names in known.items() if not names & used]
    assert missing == []


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in cells, panel["title"]
                cells.add((x, y))


def test_compose_mounts_files_that_exist() -> None:
    (compose,) = documents("compose.yaml")
    services = compose["services"]
    assert {"tokenspeed", "tokenspeed-cuda", "prometheus", "grafana"} == set(services)
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("./") and source != "./models":
                assert (DEPLOY / source).exists(), source
            elif not source.startswith("./"):
                assert source in compose["volumes"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
    stages = set(
        re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    )
    for name in ("tokenspeed", "tokenspeed-cuda"):
        server = services[name]
        assert server["build"]["target"] in stages
        variables = [entry.partition("=")[0] for entry in server["environment"]]
        check_settings(server["command"], variables)


def test_prometheus_scrapes_the_server_with_its_key() -> None:
    (config,) = documents("prometheus.yml")
    (compose,) = documents("compose.yaml")
    (job,) = config["scrape_configs"]
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    aliases = compose["services"]["tokenspeed"]["networks"]["default"]["aliases"]
    assert (job["metrics_path"], [host], port) == ("/metrics", aliases, "8000")
    secret = Path(job["authorization"]["credentials_file"]).name
    assert secret in compose["services"]["prometheus"]["secrets"]
    assert secret in compose["secrets"]


def test_grafana_is_provisioned_with_the_dashboard() -> None:
    (sources,) = documents("grafana/provisioning/datasources/prometheus.yaml")
    (provider,) = documents("grafana/provisioning/dashboards/tokenspeed.yaml")
    (compose,) = documents("compose.yaml")
    uid = sources["datasources"][0]["uid"]
    assert all(target["datasource"]["uid"] == uid for p in panels() for target in p["targets"])
    folder = provider["providers"][0]["options"]["path"]
    mounts = compose["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{folder}:ro" in mounts


def test_kubernetes_manifest_probes_and_bounds_the_server() -> None:
    found = {document["kind"]: document for document in documents("kubernetes.yaml")}
    pod = found["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["resources"]["limits"]["memory"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(ports["http"])
    assert found["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    claims = [each["persistentVolumeClaim"]["claimName"] for each in pod["spec"]["volumes"][:1]]
    assert claims == [found["PersistentVolumeClaim"]["metadata"]["name"]]
    check_settings(container["args"], [each["name"] for each in container["env"]])


def test_systemd_unit_runs_the_server() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(DEPLOY / "tokenspeed.service")
    service = unit["Service"]
    assert service["ExecStart"].split()[1:] == ["serve"]
    assert int(service["TimeoutStopSec"]) > 10
    assert "TOKENSPEED_CONFIG=" in service["Environment"]
    # Only this folder can be written to: caches of models and kernels are there.
    assert f"HOME=/var/cache/{service['CacheDirectory']}" in service["Environment"].split()
    # The first process drains the others; a signal to all of them would end the engine early.
    assert service["KillMode"] == "mixed"


def test_image_installs_every_default_plugin() -> None:
    lines = (ROOT / "Dockerfile").read_text()
    text = (ROOT / "tokenspeed_core" / "pyproject.toml").read_text()
    extra = re.search(r"^default = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert extra
    for name in re.findall(r'"([\w-]+)"', extra[1]):
        assert re.search(rf"{name}\b|{name.replace('-', '_')}\b", lines), name
