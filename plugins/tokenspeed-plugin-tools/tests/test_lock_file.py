"""The file of a lock: what is said of one that is not there, damaged, or something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenspeed_plugin_tools.lock_file import WRITTEN

Refusal = Callable[..., str]
TABLE = "[toy]\nversion = '1'\nsha256 = 'ab'\nentry_points = []\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[toy", "it is no TOML: "),
        ("[toy]\nversion = '1'", "[toy] lacks sha256 and entry_points"),
        ("toy = 'text'", "toy is no table of a distribution"),
        (TABLE + "signed = true", "[toy] has signed, which this version knows nothing of"),
        (
            TABLE.replace("'1'", "1"),
            "[toy] must have a list of texts as its entry_points, and else texts",
        ),
        (TABLE.replace("[]", "'models Toy = toy'"), "[toy] must have a list of texts"),
        (TABLE.replace("[]", "[1]"), "[toy] must have a list of texts"),
        (TABLE + TABLE.replace("toy", "Toy"), "[Toy] stands there twice"),
        ("\xff", "can't decode"),
    ],
)
def test_a_file_that_is_no_lock_is_refused_with_what_is_wrong_in_it_and_not_written_over_unless_it_was_one(
    tmp_path: Path, refusal: Refusal, text: str, expected: str
) -> None:
    file = tmp_path / "the lock"
    file.write_bytes(text.encode("latin-1"))
    said = refusal("serve", "--plugins-lock", str(file), "--dry-run")
    assert said.startswith(f"plugins lock {file}: ")
    assert expected in said
    assert said.endswith("; name a file that `tokenspeed plugins freeze` wrote")
    assert refusal("plugins", "verify", str(file)) == said
    if text.isascii():
        file.write_text(f"{WRITTEN}\n{text}")
        said = refusal("plugins", "verify", str(file))
        assert expected in said
        anew = f"`tokenspeed plugins freeze -o '{file}'` writes it anew"
        assert said.endswith(f"; restore it, or where what is installed is meant, {anew}")


def test_a_lock_that_is_not_there_a_folder_and_an_empty_one_are_told_apart(
    tmp_path: Path, refusal: Refusal
) -> None:
    file = tmp_path / "lock"
    assert refusal("plugins", "verify", str(file)) == (
        f"plugins lock {file}: No such file or directory; `tokenspeed plugins freeze -o {file}` writes one"
    )
    assert refusal("plugins", "verify", str(tmp_path)) == (
        f"plugins lock {tmp_path}: Is a directory; name a file that `tokenspeed plugins freeze` wrote"
    )
    file.touch()
    said = refusal("plugins", "verify", str(file))
    assert "it locks nothing, as a file does that a `freeze` which failed was to write" in said
    assert said.endswith(f"`tokenspeed plugins freeze -o {file}` writes it anew")
