"""The store of responses: bounds, owners, and the order of eviction."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenspeed_server.responses_api.store import (
    ResponseStore,
    StoredResponse,
    forget_path,
    shared_file,
)

from tokenspeed_core.commands.serving import BadRequestError


def stored(response: bytes = b"{}") -> StoredResponse:
    return StoredResponse(None, b"[1]", response)


operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "delete"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 9),
        st.integers(0, 200),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(operations=operations)
def test_store_equals_a_dictionary_within_its_bounds(
    operations: list[tuple[str, str, int, int]],
) -> None:
    store = ResponseStore(max_responses=1000, max_bytes=10**6)
    expected: dict[tuple[str, str], bytes] = {}
    for kind, owner, number, size in operations:
        key = (owner, f"{owner}{number}")
        match kind:
            case "put" if key not in expected:
                expected[key] = b"x" * size
                store.put(*key, stored(expected[key]))
            case "delete":
                assert store.delete(*key) == (expected.pop(key, None) is not None)
            case _:
                found = store.get(*key)
                assert (None if found is None else found.response) == expected.get(key)
                assert store.get("c", key[1]) is None
    store.close()


@settings(max_examples=50, deadline=None)
@given(
    puts=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 400)), min_size=1, max_size=60)
)
def test_bounds_hold_and_the_newest_response_stays(puts: list[tuple[str, int]]) -> None:
    store = ResponseStore(max_responses=7, max_bytes=2000)
    for number, (owner, size) in enumerate(puts):
        store.put(owner, str(number), stored(b"x" * size))
        assert store.get(owner, str(number)) is not None
    left = [
        found
        for number, (owner, _) in enumerate(puts)
        if (found := store.get(owner, str(number))) is not None
    ]
    assert len(left) <= 7
    assert sum(len(each.input) + len(each.response) for each in left) <= 2000
    store.close()


def test_least_recently_used_response_is_dropped_first() -> None:
    store = ResponseStore(max_responses=2)
    for name in ("1", "2"):
        store.put("a", name, stored())
    assert store.get("a", "1") is not None
    store.put("a", "3", stored())
    assert store.get("a", "2") is None
    assert store.get("a", "1") is not None
    store.close()


def test_large_owner_does_not_displace_others() -> None:
    store = ResponseStore(max_responses=10)
    store.put("small", "mine", stored())
    for number in range(50):
        store.put("large", str(number), stored())
    assert store.get("small", "mine") is not None
    store.close()


def test_huge_input_is_refused() -> None:
    store = ResponseStore(max_bytes=1000)
    with pytest.raises(BadRequestError) as caught:
        store.encode(["x" * 1000])
    assert caught.value.param == "store"
    store.close()


def test_full_disk_loses_only_the_new_response(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResponseStore(tmp_path / "store")
    store.put("a", "1", stored())
    store._database.execute("pragma max_page_count = 1")  # as small as it is now
    store.put("a", "2", stored(b"x" * 100_000))
    assert "not stored" in caplog.text
    assert store.get("a", "1") is not None
    assert store.get("a", "2") is None
    store.close()


def test_stores_keep_working_when_their_path_is_forgotten() -> None:
    with shared_file() as path:
        first, second = ResponseStore(path), ResponseStore(path)
        forget_path(path)
        assert not path.parent.exists()
        first.put("a", "1", stored())
        second.put("a", "2", stored())
        assert second.get("a", "1") == first.get("a", "2") == stored()
        first.close()
        second.close()


def test_two_stores_share_a_file(tmp_path: Path) -> None:
    first, second = ResponseStore(tmp_path / "store"), ResponseStore(tmp_path / "store")
    first.put("a", "1", stored(b"{}"))
    assert second.get("a", "1") == first.get("a", "1") == stored(b"{}")
    assert second.delete("a", "1")
    assert first.get("a", "1") is None
    first.close()
    second.close()
