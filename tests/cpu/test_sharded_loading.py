"""A process that shares a model reads the pages of its part of a checkpoint, and few others."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import struct
import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from process_pool import RankBuild, Sizes, tensor_parallel

from tokenspeed_models.layers.experts import Experts
from tokenspeed_models.layers.linear import Linear, Projection
from tokenspeed_models.loading.pages import MIN_GAP, byte_ranges
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.weights import Shard, WeightMap

SIZE = 2048  # of a square weight in float32: 16 MiB
WEIGHT = SIZE * SIZE * 4
HEAD = 64 << 20  # of a file: Linux reads several megabytes after the header

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its page cache")


def resident(file: Path) -> int:
    """Return how many bytes after the head of a file are in memory."""
    size = file.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        start = ctypes.byref(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None).mincore(start, ctypes.c_size_t(size), pages) == 0
        del start
    return sum(each & 1 for each in pages[HEAD // mmap.PAGESIZE :]) * mmap.PAGESIZE


def evict(file: Path) -> None:
    """Remove a file from memory, or skip the test where that is impossible, such as on tmpfs."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(file):
        pytest.skip("the file system of temporary files keeps them in memory")


def write_sparse(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Write float32 weights of zeros after the head of a file. They take no space on the disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in {"head": (HEAD // 4,), **shapes}.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    file = folder / "model.safetensors"
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)
    return file


@pytest.fixture(scope="module")
def linear_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = "before.weight", "up.weight", "later.weight"
    return write_sparse(tmp_path_factory.mktemp("linear"), dict.fromkeys(names, (SIZE, SIZE)))


@pytest.fixture(scope="module")
def experts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = (
        f"experts.{expert}.{name}_proj.weight"
        for expert, name in product(range(16), ("gate", "up", "down"))
    )
    return write_sparse(tmp_path_factory.mktemp("experts"), dict.fromkeys(names, (512, 512)))


def load(layer: Linear | Experts, build: RankBuild, file: Path) -> int:
    """Load a layer from a file that is not in memory; return how many bytes of it were read."""
    evict(file)
    ignored = "head", "before.weight", "later.weight"
    weights = WeightMap(layer.slots(""), ignored, groups=build.group)
    model: Any = None  # the reader does not use it
    weights.load(read_safetensors(str(file.parent), model, lambda done, total: None))
    return resident(file)


def load_linear(file: Path, axis: int, num_processes: int, rank: int) -> int:
    build = RankBuild(tensor_parallel(num_processes).layout(rank))
    layer = Linear(build, SIZE, (Projection("up", SIZE, Shard(axis, "dense")),))
    return load(layer, build, file)


def is_exact(num_read: int, expected: int, num_ranges: int) -> bool:
    """Return whether ranges were read, with the rest of the pages in which they begin and end."""
    return expected <= num_read <= expected + num_ranges * 2 * mmap.PAGESIZE


@pytest.mark.parametrize("num_processes", [2, 4])
def test_rows_of_a_weight_are_read_by_their_process_alone(
    linear_file: Path, num_processes: int
) -> None:
    for rank in range(num_processes):
        num_read = load_linear(linear_file, 0, num_processes, rank)
        assert is_exact(num_read, WEIGHT // num_processes, 1)


@pytest.mark.parametrize("num_processes", [2, 4])
def test_columns_of_a_weight_are_read_with_the_rest_of_their_rows(
    linear_file: Path, num_processes: int
) -> None:
    row = 4 * SIZE
    for rank in range(num_processes):
        num_read = load_linear(linear_file, 1, num_processes, rank)
        assert is_exact(num_read, WEIGHT - row + row // num_processes, 1)


@pytest.mark.parametrize(
    "groups", [Sizes(experts=2), Sizes(experts=4), Sizes(attn=2, experts=4, data=2)], ids=str
)
def test_experts_are_read_by_their_process_alone(experts_file: Path, groups: Sizes) -> None:
    sizes = {"num_experts": 16, "top_k": 2, "hidden_size": 512, "intermediate_size": 512}
    num_processes = groups.experts
    for rank in range(num_processes):
        build = RankBuild(groups.layout(rank))
        num_read = load(Experts(build, **sizes), build, experts_file)
        assert is_exact(num_read, 48 * (1 << 20) // num_processes, 48 // num_processes)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    order=st.permutations(range(3)),
    whole=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    min_gap=st.integers(1, 40),
)
def test_ranges_hold_all_elements_and_no_large_gap(
    shape: list[int], order: list[int], whole: list[int], min_gap: int
) -> None:
    sizes = [size + more for size, more in zip(shape, whole, strict=False)]
    axes = [axis for axis in order if axis < len(shape)]
    view = torch.zeros(sizes)[tuple(slice(size) for size in shape)].permute(axes)
    ranges = byte_ranges(view.shape, view.stride(), 4, min_gap)
    covered = [byte for start, size in ranges for byte in range(start, start + size)]
    starts = {
        4 * sum(index * stride for index, stride in zip(each, view.stride(), strict=True))
        for each in product(*map(range, view.shape))
    }
    used = {start + offset for start in starts for offset in range(4)}
    assert covered == sorted(covered) and len(set(covered)) == len(covered)
    assert used <= set(covered)
    assert {start for start, _ in ranges} <= starts
    for (start, size), (following, _) in pairwise(ranges):
        assert following - start - size >= min_gap
    gaps = [b - a - 1 for a, b in zip(sorted(used), sorted(used)[1:], strict=False)]
    assert len(ranges) == 1 + sum(gap >= min_gap for gap in gaps)


def test_ranges_of_a_column_slice_are_the_whole_tensor() -> None:
    rows, columns = 8192, 28672  # of the down projection of Llama 3.1 70B
    part = byte_ranges((rows, columns // 8), (columns, 1), 2)
    assert part == [(0, (rows - 1) * columns * 2 + columns // 8 * 2)]
    assert math.prod((rows, columns, 2)) - part[0][1] < MIN_GAP
    assert byte_ranges((0, 5), (5, 1), 2) == []
