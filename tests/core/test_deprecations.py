"""What is deprecated works, and warns with the plugin, the old, the new and the version in which it goes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

import tokenspeed_core
from tokenspeed_core import api
from tokenspeed_core.config import Config
from tokenspeed_core.config.build import rebuild
from tokenspeed_core.config.sources import load
from tokenspeed_core.plugins import Catalog, Selection, Status
from tokenspeed_core.plugins.deprecations import DEPRECATED, Deprecation, warn
from tokenspeed_core.plugins.kinds import KINDS, Kind

CORE = Path(tokenspeed_core.__file__).parent
SAID = "is deprecated since tokenspeed-core 0.2 and goes with 0.4; use "
ONCE = """
import sys
from tokenspeed_core import api
from tokenspeed_core.plugins.deprecations import DEPRECATED, Deprecation
DEPRECATED["tokenspeed_core.api.Glance"] = Deprecation("0.2", "0.4", "tokenspeed_core.api.View")
api._Glance = api.View
import acme_flash
for _ in range(3):
    acme_flash.look()
"""


@pytest.fixture
def deprecate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deprecate something of every sort: a name, a parameter, an older contract and a setting."""
    for old, new in {
        "tokenspeed_core.api.Glance": "tokenspeed_core.api.View",
        "tokenspeed_core.api.look(far)": "distance",
        "kind policies [api1]": "[api2]",
        "flag --seed": "--random-seed",
    }.items():
        monkeypatch.setitem(DEPRECATED, old, Deprecation("0.2", "0.4", new))
    monkeypatch.setattr(api, "_Glance", api.View, raising=False)
    monkeypatch.setitem(KINDS, "policies", Kind(2))


def installed(folder: Path, version: int) -> list[Distribution]:
    """Return a distribution with a policy of that api, which stands in a folder."""
    info = folder / "acme_flash-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-flash\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[tokenspeed.policies]\nacme/flash = builtins:object [api{version}]\n"
    )
    return list(distributions(path=[str(folder)]))


@pytest.mark.usefixtures("deprecate")
def test_a_deprecated_name_is_what_it_was_and_its_importer_is_told_what_replaces_it() -> None:
    space: dict[str, object] = {"__name__": "acme_flash.kernel"}
    with pytest.warns(FutureWarning) as caught:
        exec("from tokenspeed_core.api import Glance", space)
    assert space["Glance"] is api.View
    (said,) = caught
    assert (
        str(said.message)
        == f"acme_flash.kernel: tokenspeed_core.api.Glance {SAID}tokenspeed_core.api.View"
    )


def test_a_name_that_never_was_is_an_error_as_before() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Glimpse'"):
        exec("from tokenspeed_core.api import Glimpse")


def test_a_process_hears_of_one_use_once(tmp_path: Path) -> None:
    (tmp_path / "acme_flash.py").write_text(
        "def look():\n    from tokenspeed_core.api import Glance\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", ONCE],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{tmp_path}:{CORE.parent}"},
    )
    assert done.stderr.count("FutureWarning: acme_flash: tokenspeed_core.api.Glance ") == 1
    assert f"{tmp_path}/acme_flash.py:2: " in done.stderr


@pytest.mark.usefixtures("deprecate")
def test_a_parameter_warns_whoever_passes_it() -> None:
    space: dict[str, object] = {"__name__": "tokenspeed_core.looking", "warn": warn}
    exec(
        "def look(far=None):\n    if far is not None:\n        warn('tokenspeed_core.api.look(far)')",
        space,
    )
    with pytest.warns(
        FutureWarning, match=r"acme_flash: tokenspeed_core\.api\.look\(far\) .* 0\.4; use distance"
    ):
        exec("look(far=1)", {"__name__": "acme_flash", "look": space["look"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec("look()", {"look": space["look"]})


@pytest.mark.usefixtures("deprecate")
def test_an_older_contract_is_taken_and_warns_when_it_is_loaded(tmp_path: Path) -> None:
    catalog = Catalog.discover(Selection(), distributions=installed(tmp_path, 1))
    (entry,) = catalog.entries("policies")
    with pytest.warns(FutureWarning) as caught:
        loaded = [catalog.load(entry, object) for _ in range(2)]
    assert loaded == [object, object]
    assert [str(each.message) for each in caught] == [
        f"acme-flash 1.0: kind policies [api1] {SAID}[api2]"
    ]


@pytest.mark.usefixtures("deprecate")
@pytest.mark.parametrize(
    ("version", "advice"), [(0, "upgrade acme-flash"), (3, "upgrade tokenspeed-core")]
)
def test_a_contract_that_is_not_in_the_table_stays_incompatible(
    tmp_path: Path, version: int, advice: str
) -> None:
    (entry,) = Catalog.discover(Selection(), distributions=installed(tmp_path, version)).all()
    assert entry.status is Status.INCOMPATIBLE
    assert entry.reason == f"needs api {version} of policies, this core has 2: {advice}"


@pytest.mark.usefixtures("deprecate")
def test_a_setting_warns_where_somebody_sets_it_and_names_who_did() -> None:
    with pytest.warns(FutureWarning, match=f"^TOKENSPEED_SEED: flag --seed {SAID}--random-seed$"):
        config = load({}, {"TOKENSPEED_SEED": "3"})
    assert config.seed == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rebuild(Config(), {"port": 1}, "plugin acme")
