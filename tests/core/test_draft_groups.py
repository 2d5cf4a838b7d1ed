"""Cache groups of a target and a draft model."""

from __future__ import annotations

from tokenspeed_core.api import FullAttention, LatentAttention, SlidingWindow
from tokenspeed_core.kv_cache.draft_groups import join_groups

FULL = FullAttention("full", 8, 4, 64)
WINDOW = SlidingWindow("window", 8, 4, 64, 128)


def test_equal_groups_share_block_tables() -> None:
    groups, names = join_groups((FULL, WINDOW), (FullAttention("all", 2, 4, 64),))
    assert groups == (FullAttention("full", 10, 4, 64), WINDOW)
    assert names == {"all": "full"}


def test_different_groups_are_not_joined() -> None:
    for other in (
        FullAttention("full", 2, 2, 64),
        LatentAttention("full", 2, 64, 16),
        SlidingWindow("full", 2, 4, 64, 64),
    ):
        groups, names = join_groups((FULL,), (other,))
        assert groups[0] == FULL
        assert [group.name for group in groups] == ["full", "draft_full"]
        assert groups[1].parts == other.parts
        assert names == {"full": "draft_full"}


def test_plan_without_draft_model_is_unchanged() -> None:
    assert join_groups((FULL, WINDOW), ()) == ((FULL, WINDOW), {})
