"""The kernels of `sample` and `greedy`. Sampling sorts nothing: an eight-way search over the logits finds the cutoffs.

Logits are [S, V]. First, many programs per row find the highest logit, count the tokens above eight depths below it,
and copy the tokens that matter, the row's *head*. Then one program per row searches the head, or the whole row if the
head is too small.

A float32 logit maps to a *key*, an int32 with the same order. A cutoff in the sorted distribution is a key, plus how
many of the tokens with exactly that key are kept (lowest ids first). The number and the probability of tokens above a
key both fall as the key rises, so each cutoff can be found by search.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernels.triton import precompile

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_FAR = tl.constexpr(80.0)  # tokens below e^-80 of the most probable one are ignored


@triton.jit
def _keys(x):
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _value(key):
    key = key.to(tl.int32)
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, position):
    """Return a float32 in [0, 1) with 24 random bits: splitmix64 of seed and position, as in the reference."""
    bits = _mix(_mix(seed.to(tl.uint64) + _GOLDEN) + position.to(tl.uint64) * _GOLDEN)
    return (bits >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _load(ptr, first, size, BLOCK: tl.constexpr):
    index = first + tl.arange(0, BLOCK)
    return tl.load(ptr + index, mask=index < size, other=float("-inf")), index < size


@triton.jit
def _search(
    ptr,
    size,
    low,
    high,
    goal,
    highest,
    inverse,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    REACHED: tl.constexpr,
):
    """Return the smallest key in (low, high] above which the measure is below goal (REACHED: at most goal).

    The measure is the number of tokens if COUNT, else the sum of exp((x - highest) * inverse).
    """
    way = tl.arange(0, 8).to(tl.int64)
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while high - low > 1:
        threshold = low + (high - low) * way // 8
        compared = threshold.to(tl.int32)
        sums = tl.zeros([8, BLOCK], dtype=tl.float32)
        for first in tl.range(0, size, BLOCK):
            x, inside = _load(ptr, first, size, BLOCK)
            above = (_keys(x)[None, :] > compared[:, None]) & inside[None, :]
            if COUNT:
                sums += tl.where(above, 1.0, 0.0)
            else:
                sums += tl.where(above, tl.exp((x - highest) * inverse)[None, :], 0.0)
        measure = tl.sum(sums, axis=1)
        if REACHED:
            enough = measure <= goal
        else:
            enough = measure < goal
        lower = tl.max(tl.where(enough, low, threshold), axis=0)
        high = tl.min(tl.where(enough, threshold, high), axis=0)
        low = tl.minimum(lower, high)
    return high.to(tl.int32)


@triton.jit
def _above(ptr, size, key, highest, inverse, BLOCK: tl.constexpr):
    """Return the probability and the number of tokens above a key, and the number of tokens equal to it."""
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    num_above = tl.zeros([BLOCK], dtype=tl.int32)
    num_equal = tl.zeros([BLOCK], dtype=tl.int32)
    for first in tl.range(0, size, BLOCK):
        x, inside = _load(ptr, first, size, BLOCK)
        keys = _keys(x)
        above = (keys > key) & inside
        mass += tl.where(above, tl.exp((x - highest) * inverse), 0.0)
        num_above += above.to(tl.int32)
        num_equal += ((keys == key) & inside).to(tl.int32)
    return tl.sum(mass, axis=0), tl.sum(num_above, axis=0), tl.sum(num_equal, axis=0)


@triton.jit
def _find(ptr, size, key, nth, BLOCK: tl.constexpr):
    """Return the index of the nth token (from 0) with this key; 0 if there is none."""
    found = tl.zeros([], dtype=tl.int32)
    seen = tl.zeros([], dtype=tl.int32)
    for first in tl.range(0, size, BLOCK):
        x, inside = _load(ptr, first, size, BLOCK)
        equal = ((_keys(x) == key) & inside).to(tl.int32)
        here = tl.sum(equal, axis=0)
        if (seen <= nth) & (nth < seen + here):
            rank = seen + tl.cumsum(equal, axis=0) - 1
            place = first + tl.arange(0, BLOCK)
            found = tl.sum(tl.where((equal == 1) & (rank == nth), place, 0), axis=0)
        seen += here
    return found


@triton.jit
def _highest(parts_ptr, row, NUM_PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    part = tl.arange(0, BLOCK_PARTS)
    return tl.max(
        tl.load(parts_ptr + row * NUM_PARTS + part, mask=part < NUM_PARTS, other=float("-inf")),
        axis=0,
    )


@triton.jit
def _warmth(temperature_ptr, row):
    """Return the temperature, or 1 for greedy rows, which need only the order."""
    temperature = tl.load(temperature_ptr + row)
    return tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def _depths(temperature):
    """Return eight depths below the highest logit: 1 to 15 nats after temperature, and infinity."""
    step = tl.arange(0, 8).to(tl.float32)
    return tl.where(step == 7.0, float("inf"), temperature * (1.0 + step + step * step * 0.225))


@precompile.jit
def highest_of_parts(
    logits_ptr, parts_ptr, stride, V: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the largest logit of each part of a row. Grid (S, parts)."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * PART
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for first in tl.range(start, start + PART, BLOCK):
        x, _ = _load(logits_ptr + row * stride, first, V, BLOCK)
        best = tl.maximum(best, x)
    tl.store(parts_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.max(best, axis=0))


@precompile.jit
def tally(
    logits_ptr,
    temperature_ptr,
    parts_ptr,
    counts_ptr,
    masses_ptr,
    stride,
    V: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Store the number and the probability of tokens above each depth, [S, parts, 8]. Grid (S, parts)."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * PART
    temperature = _warmth(temperature_ptr, row)
    highest = _highest(parts_ptr, row, NUM_PARTS, BLOCK_PARTS)
    floors = highest - _depths(temperature)
    counts = tl.zeros([8, BLOCK], dtype=tl.int32)
    masses = tl.zeros([8, BLOCK], dtype=tl.float32)
    for first in tl.range(start, start + PART, BLOCK):
        x, inside = _load(logits_ptr + row * stride, first, V, BLOCK)
        above = (x[None, :] > floors[:, None]) & inside[None, :]
        counts += above.to(tl.int32)
        masses += tl.where(above, tl.exp((x - highest) / temperature)[None, :], 0.0)
    at = (row * NUM_PARTS + tl.program_id(1)) * 8 + tl.arange(0, 8)
    tl.store(counts_ptr + at, tl.sum(counts, axis=1))
    tl.store(masses_ptr + at, tl.sum(masses, axis=1))


@precompile.jit
def gather_head(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    parts_ptr,
    counts_ptr,
    masses_ptr,
    values_ptr,
    ids_ptr,
    sizes_ptr,
    stride,
    V: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ENOUGH: tl.constexpr,
):
    """Copy the head of a row: its tokens above one depth, in order of id. Grid (S, parts).

    The depth is the smallest that holds the top-k tokens or, without top-k, ENOUGH of the probability. If such a head
    does not fit, it is the largest depth that does.
    """
    row = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1)
    part = tl.arange(0, BLOCK_PARTS)
    depth = tl.arange(0, 8)
    at = (row * NUM_PARTS + part)[:, None] * 8 + depth[None, :]
    counts = tl.load(counts_ptr + at, mask=(part < NUM_PARTS)[:, None], other=0)
    masses = tl.load(masses_ptr + at, mask=(part < NUM_PARTS)[:, None], other=0.0)
    totals = tl.sum(counts, axis=0)
    held = tl.sum(masses, axis=0)
    top_k = tl.load(top_k_ptr + row)
    limited = (top_k > 0) & (top_k < V)
    good = tl.where(limited, totals >= top_k, held >= ENOUGH * tl.max(held, axis=0))
    least = tl.min(tl.where(good, depth, 7), axis=0)
    largest = tl.max(tl.where(totals <= CAPACITY, depth, -1), axis=0)
    chosen = tl.minimum(least, largest)
    picked = depth == chosen
    size = tl.sum(tl.where(picked, totals, 0), axis=0)
    if mine == 0:
        tl.store(sizes_ptr + row, size)
    before = tl.where((part < mine)[:, None] & picked[None, :], counts, 0)
    place = tl.sum(tl.sum(before, axis=1), axis=0)
    temperature = _warmth(temperature_ptr, row)
    floors = _highest(parts_ptr, row, NUM_PARTS, BLOCK_PARTS) - _depths(temperature)
    floor = tl.sum(tl.where(picked, floors, 0.0), axis=0)
    if size > 0:
        for first in tl.range(mine * PART, mine * PART + PART, BLOCK):
            x, inside = _load(logits_ptr + row * stride, first, V, BLOCK)
            above = ((x > floor) & inside).to(tl.int32)
            to = row * CAPACITY + place + tl.cumsum(above, axis=0) - 1
            tl.store(values_ptr + to, x, mask=above == 1)
            tl.store(ids_ptr + to, first + tl.arange(0, BLOCK), mask=above == 1)
            place += tl.sum(above, axis=0)


@precompile.jit
def sample(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    parts_ptr,
    masses_ptr,
    values_ptr,
    head_ids_ptr,
    sizes_ptr,
    ids_ptr,
    stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Sample by inverse transform from the sorted distribution, cut off by top-k, top-p and min-p. Grid (S).

    Searches the row's head, and the whole row only if a cutoff or the sampled token is not in the head.
    """
    row = tl.program_id(0).to(tl.int64)
    is_greedy = tl.load(temperature_ptr + row) <= 0.0
    temperature = _warmth(temperature_ptr, row)
    inverse = 1.0 / temperature
    top_k = tl.where(is_greedy, 1, tl.load(top_k_ptr + row))
    top_p = tl.where(is_greedy, 1.0, tl.load(top_p_ptr + row))
    min_p = tl.where(is_greedy, 0.0, tl.load(min_p_ptr + row))
    highest = _highest(parts_ptr, row, NUM_PARTS, BLOCK_PARTS)
    high = _keys(highest)
    u = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    part = tl.arange(0, BLOCK_PARTS)
    all_mass = tl.sum(
        tl.load(masses_ptr + (row * NUM_PARTS + part) * 8 + 7, mask=part < NUM_PARTS, other=0.0),
        axis=0,
    )

    ptr = values_ptr + row * CAPACITY
    size = tl.load(sizes_ptr + row)
    token = tl.zeros([], dtype=tl.int32)
    attempt = 0
    if size == 0:
        attempt = 1
    while attempt < 2:
        if attempt == 1:
            ptr = logits_ptr + row * stride
            size = tl.full([], V, dtype=tl.int32)
        lowest = _keys(highest - _FAR * temperature)
        held, num_held, _ = _above(ptr, size, lowest - 1, highest, inverse, BLOCK)
        inside = True
        cut = lowest
        num_ties = V
        total = tl.maximum(all_mass, held)
        if (top_k > 0) & (top_k < V):
            inside = inside & (num_held >= top_k)
            key = _search(
                ptr,
                size,
                lowest - 1,
                high,
                top_k.to(tl.float32),
                highest,
                inverse,
                BLOCK,
                True,
                False,
            )
            mass, num_above, num_equal = _above(ptr, size, key, highest, inverse, BLOCK)
            cut = key
            num_ties = tl.minimum(top_k - num_above, num_equal)
            total = mass + num_ties * tl.exp((_value(key) - highest) * inverse)
        if top_p < 1.0:
            goal = top_p * total
            inside = inside & (goal <= held)
            key = _search(ptr, size, cut - 1, high, goal, highest, inverse, BLOCK, False, False)
            mass, _, num_equal = _above(ptr, size, key, highest, inverse, BLOCK)
            p = tl.exp((_value(key) - highest) * inverse)
            kept = tl.minimum(
                tl.maximum(tl.ceil((goal - mass) / p), 1.0), num_equal.to(tl.float32)
            ).to(tl.int32)
            num_ties = tl.where(key > cut, kept, tl.minimum(num_ties, kept))
            cut = key
            total = mass + num_ties * p
        if min_p > 0.0:
            key = _keys(highest + tl.log(min_p) * temperature)
            if key > cut:
                cut = key
                num_ties = V
                total, num_above, _ = _above(ptr, size, cut - 1, highest, inverse, BLOCK)
                inside = inside & (num_above < num_held)
        target = u * total
        inside = inside & (target < held)
        if inside | (attempt == 1):
            key = _search(ptr, size, cut - 1, high, target, highest, inverse, BLOCK, False, True)
            mass, _, num_equal = _above(ptr, size, key, highest, inverse, BLOCK)
            nth = ((target - mass) / tl.exp((_value(key) - highest) * inverse)).to(tl.int32)
            last = tl.where(key == cut, tl.minimum(num_equal, num_ties), num_equal) - 1
            token = _find(ptr, size, key, tl.maximum(tl.minimum(nth, last), 0), BLOCK)
            if attempt == 0:
                token = tl.load(head_ids_ptr + row * CAPACITY + token)
            attempt = 2
        else:
            attempt = 1
    # NaN logits have no order; keep the id in range.
    token = tl.minimum(tl.maximum(token, 0), V - 1)
    tl.store(ids_ptr + row, token.to(tl.int64))


@precompile.jit
def greedy_parts(
    logits_ptr,
    values_ptr,
    ids_ptr,
    stride,
    V: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the largest logit of each part of a row, and the lowest id that has it. Grid (S, parts)."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * PART
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    where = tl.full([BLOCK], V, dtype=tl.int32)
    for first in tl.range(start, start + PART, BLOCK):
        index = first + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride + index, mask=index < V, other=float("-inf")).to(
            tl.float32
        )
        better = (x > best) & (index < V)
        where = tl.where(better | (where == V) & (index < V), index, where)
        best = tl.where(better, x, best)
    value = tl.max(best, axis=0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values_ptr + at, value)
    tl.store(ids_ptr + at, tl.min(tl.where(best == value, where, V), axis=0))


@precompile.jit
def greedy_merge(
    values_ptr, parts_ptr, ids_ptr, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr
):
    """Store the id of the largest logit over a row's parts. Grid (S)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    values = tl.load(
        values_ptr + row * NUM_PARTS + part, mask=part < NUM_PARTS, other=float("-inf")
    )
    ids = tl.load(parts_ptr + row * NUM_PARTS + part, mask=part < NUM_PARTS, other=V)
    best = tl.min(tl.where(values == tl.max(values, axis=0), ids, V), axis=0)
    tl.store(ids_ptr + row, tl.minimum(best, V - 1).to(tl.int64))
