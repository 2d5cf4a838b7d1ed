"""The policy's view of the sequences. These functions only read."""

from __future__ import annotations

import numpy as np

from tokenspeed_core.api.policy import Candidate, View
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.kv_cache.match import Match
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.drafts import DraftSource
from tokenspeed_core.scheduler.sequence import Sequence
from tokenspeed_core.scheduler.sequence_table import SequenceTable


def view_of_running(
    columns: SlotColumns,
    kv: KVManager,
    sequences: SequenceTable,
    drafts: DraftSource | None,
) -> View:
    """Return the sequences with a slot that have tokens to compute. Draft tokens never cause a preemption."""
    decoding = columns.decoding()
    bound = columns.num_bound[decoding]
    room = columns.max_len[decoding] - bound
    has_room = room > 0  # else its last token is in flight
    if np.count_nonzero(has_room) < len(room):
        decoding, room, bound = decoding[has_room], room[has_room], bound[has_room]
    num_decodes = len(decoding)
    num_query = np.ones(num_decodes, np.int32)
    slots, end = decoding, bound
    num_drafts = None if drafts is None else drafts.count(decoding, room - 1)
    if num_drafts is not None:
        num_query += num_drafts
        end = bound + num_drafts
    prefilling = columns.prefilling()
    if len(prefilling):
        num_planned = columns.num_planned[prefilling]
        slots = np.concatenate((slots, prefilling))
        num_query = np.concatenate((num_query, columns.target[prefilling] - num_planned))
        end = np.concatenate((end, num_planned + 1))
    resumed, capacity, available = (
        columns.resumed[slots],
        columns.capacity[slots],
        kv.pool.num_available,
    )
    num_new_pages = kv.num_new_pages(resumed, capacity, end)
    is_short = int(num_new_pages.sum()) > available
    if is_short and num_drafts is not None:
        num_query[:num_decodes] = 1
        end[:num_decodes] = bound
        num_new_pages = kv.num_new_pages(resumed, capacity, end)
        is_short = int(num_new_pages.sum()) > available
    num_held_pages = np.zeros(len(slots), np.int32)
    if is_short:  # otherwise no policy needs to preempt
        held = [kv.num_held_pages(sequences.blocks(int(slot))) for slot in slots]
        num_held_pages = np.asarray(held, np.int32)
    return View(
        slots,
        num_decodes,
        num_query,
        num_new_pages,
        num_held_pages,
        columns.priority[slots],
        columns.arrival[slots],
    )


def candidate_of(sequence: Sequence, match: Match, kv: KVManager) -> Candidate:
    """Return the policy's view of a waiting sequence with a prefix hit."""
    num_tokens = len(sequence.tokens)
    end = min(num_tokens + 1, sequence.max_len)
    num_new_pages = kv.num_pages_needed(match.num_tokens, end)
    return Candidate(num_tokens, match.num_tokens, num_new_pages, match.num_idle)


def num_promised_pages(columns: SlotColumns, kv: KVManager) -> int:
    """Return the pages that running prompts still need for all their tokens and the next one."""
    slots = columns.prefilling()
    if not len(slots):
        return 0
    end = columns.target[slots] + 1
    return kv.num_promised_pages(columns.resumed[slots], columns.capacity[slots], end)
