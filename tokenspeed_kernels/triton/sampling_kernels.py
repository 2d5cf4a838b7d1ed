"""Triton code of sampling without sorting: thresholds are found by eight-way search over the logits' order.

A float32 becomes a *key*, an int32 in the same order. A cut of the sorted distribution is a key and how many
of the tokens with that very key, lowest ids first, still belong to it; both counts and probabilities above a
key fall as it rises, so each cut is a search.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-2147483648)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_FAR = tl.constexpr(80.0)  # e^-80 of the likeliest is no probability


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
    """Return a float32 in [0, 1) of 24 bits: splitmix64 of seed and position, as the reference has it."""
    bits = _mix(_mix(seed.to(tl.uint64) + _GOLDEN) + position.to(tl.uint64) * _GOLDEN)
    return (bits >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _load(row_ptr, first, V: tl.constexpr, BLOCK: tl.constexpr):
    index = first + tl.arange(0, BLOCK)
    return tl.load(row_ptr + index, mask=index < V, other=float("-inf")), index < V


@triton.jit
def _search(
    row_ptr, low, high, goal, highest, inverse,
    V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, REACHED: tl.constexpr,
):
    """Return the smallest key in (low, high] above which the measure is less than goal (REACHED: no more).

    The measure is the number of tokens if COUNT, else the sum of exp((x - highest) * inverse).
    """
    way = tl.arange(0, 8).to(tl.int64)
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while high - low > 1:
        threshold = low + (high - low) * way // 8
        compared = threshold.to(tl.int32)
        sums = tl.zeros([8, BLOCK], dtype=tl.float32)
        for first in tl.range(0, V, BLOCK):
            x, inside = _load(row_ptr, first, V, BLOCK)
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
    return high


@triton.jit
def _above(row_ptr, key, highest, inverse, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return the probability and number of tokens above a key, and the number at it."""
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    num_above = tl.zeros([BLOCK], dtype=tl.int32)
    num_equal = tl.zeros([BLOCK], dtype=tl.int32)
    for first in tl.range(0, V, BLOCK):
        x, inside = _load(row_ptr, first, V, BLOCK)
        keys = _keys(x)
        above = (keys > key) & inside
        mass += tl.where(above, tl.exp((x - highest) * inverse), 0.0)
        num_above += above.to(tl.int32)
        num_equal += ((keys == key) & inside).to(tl.int32)
    return tl.sum(mass, axis=0), tl.sum(num_above, axis=0), tl.sum(num_equal, axis=0)


@triton.jit
def _find(row_ptr, key, nth, otherwise, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return the id of the nth token, from 0 and in order of id, whose key it is."""
    found = otherwise
    seen = tl.zeros([], dtype=tl.int32)
    for first in tl.range(0, V, BLOCK):
        x, inside = _load(row_ptr, first, V, BLOCK)
        equal = ((_keys(x) == key) & inside).to(tl.int32)
        here = tl.sum(equal, axis=0)
        if (seen <= nth) & (nth < seen + here):
            rank = seen + tl.cumsum(equal, axis=0) - 1
            index = first + tl.arange(0, BLOCK)
            found = tl.sum(tl.where((equal == 1) & (rank == nth), index, 0), axis=0)
        seen += here
    return found


@triton.jit
def sample(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, ids_ptr, stride,
    V: tl.constexpr, BLOCK: tl.constexpr,
):
    """Grid (rows): the token at a uniform number in the sorted distribution cut by top-k, top-p and min-p."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    temperature = tl.load(temperature_ptr + row)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for first in tl.range(0, V, BLOCK):
        x, _ = _load(row_ptr, first, V, BLOCK)
        best = tl.maximum(best, x)
    highest = tl.max(best, axis=0)
    high = _keys(highest)
    token = _find(row_ptr, high, 0, 0, V, BLOCK)
    if temperature > 0.0:
        inverse = 1.0 / temperature
        cut = _keys(highest - _FAR * temperature)
        num_ties = V
        total, _, _ = _above(row_ptr, cut - 1, highest, inverse, V, BLOCK)
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < V):
            goal = top_k.to(tl.float32)
            lowest = tl.full([], _LOWEST, tl.int64)
            key = _search(row_ptr, lowest, high, goal, highest, inverse, V, BLOCK, True, False)
            mass, num_above, _ = _above(row_ptr, key.to(tl.int32), highest, inverse, V, BLOCK)
            if key >= cut:
                cut = key.to(tl.int32)
                num_ties = top_k - num_above
                total = mass + num_ties * tl.exp((_value(key) - highest) * inverse)
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            goal = top_p * total
            key = _search(row_ptr, cut - 1, high, goal, highest, inverse, V, BLOCK, False, False)
            mass, _, num_equal = _above(row_ptr, key.to(tl.int32), highest, inverse, V, BLOCK)
            p = tl.exp((_value(key) - highest) * inverse)
            kept = tl.minimum(tl.maximum(tl.ceil((goal - mass) / p), 1.0), num_equal.to(tl.float32))
            if key > cut:
                num_ties = kept.to(tl.int32)
            else:
                num_ties = tl.minimum(num_ties, kept.to(tl.int32))
            cut = key.to(tl.int32)
            total = mass + num_ties * p
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0.0:
            key = _keys(highest + tl.log(min_p) * temperature)
            if key > cut:
                cut = key
                num_ties = V
                total, _, _ = _above(row_ptr, cut - 1, highest, inverse, V, BLOCK)
        target = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row)) * total
        key = _search(row_ptr, cut - 1, high, target, highest, inverse, V, BLOCK, False, True)
        mass, _, num_equal = _above(row_ptr, key.to(tl.int32), highest, inverse, V, BLOCK)
        nth = ((target - mass) / tl.exp((_value(key) - highest) * inverse)).to(tl.int32)
        last = num_equal - 1
        if key == cut:
            last = tl.minimum(last, num_ties - 1)
        token = _find(row_ptr, key.to(tl.int32), tl.maximum(tl.minimum(nth, last), 0), token, V, BLOCK)
    tl.store(ids_ptr + row, token.to(tl.int64))


@triton.jit
def greedy_parts(
    logits_ptr, values_ptr, ids_ptr, stride, V: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):
    """Grid (rows, parts): the largest logit of each part of a row, and the lowest id that has it."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * PART
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    where = tl.full([BLOCK], V, dtype=tl.int32)
    for first in tl.range(start, start + PART, BLOCK):
        index = first + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride + index, mask=index < V, other=float("-inf")).to(tl.float32)
        better = (x > best) & (index < V)
        where = tl.where(better | (where == V) & (index < V), index, where)
        best = tl.where(better, x, best)
    value = tl.max(best, axis=0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values_ptr + at, value)
    tl.store(ids_ptr + at, tl.min(tl.where(best == value, where, V), axis=0))


@triton.jit
def greedy_merge(values_ptr, parts_ptr, ids_ptr, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr):
    """Grid (rows): the best of a row's parts."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    values = tl.load(values_ptr + row * NUM_PARTS + part, mask=part < NUM_PARTS, other=float("-inf"))
    ids = tl.load(parts_ptr + row * NUM_PARTS + part, mask=part < NUM_PARTS, other=V)
    best = tl.min(tl.where(values == tl.max(values, axis=0), ids, V), axis=0)
    tl.store(ids_ptr + row, tl.minimum(best, V - 1).to(tl.int64))
