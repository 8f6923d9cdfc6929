"""Assign tensors to files and offsets: pure functions of ints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(size: int | str) -> int:
    """Parse a size such as 5_000_000, "200MB" (decimal, as in Hugging Face) or "2GiB" (binary) into bytes.

    Raises:
        ValueError: if `size` is malformed, or less than a byte.
    """
    if isinstance(size, int):
        count = size
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"{size!r} is not a size: use a number of bytes, or a string such as '200MB' or '5GB'")
        count = int(float(match[1]) * _UNITS[match[2].upper()])
    if count < 1:
        raise ValueError(f"the size {size!r} must be at least one byte")
    return count


def split(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Split tensors of `sizes` bytes into files of at most `limit` bytes; returns the indices of each file's tensors.

    In the given order, like huggingface_hub's `split_torch_state_dict_into_shards`: a tensor above the limit gets a
    file of its own, and the current file continues after it.
    """
    files: list[list[int]] = []
    current: list[int] = []
    nbytes = 0
    for index, size in enumerate(sizes):
        if size > limit:
            files.append([index])
            continue
        if nbytes + size > limit:
            files.append(current)
            current, nbytes = [], 0
        current.append(index)
        nbytes += size
    if current or not files:
        files.append(current)
    return files


def file_names(count: int) -> list[str]:
    """The names of `count` files, as `from_pretrained` expects them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


class Extent(NamedTuple):
    """The bytes [begin, end) of tensor number `which` in a file's data."""

    which: int
    begin: int
    end: int


def layout(sizes: Sequence[int], itemsizes: Sequence[int], block: int) -> list[Extent]:
    """The extents of the tensors in one file, without gaps; each is aligned to its element size.

    Tensors whose size is a multiple of `block` bytes come first, so that blocks rarely split a tensor where its random
    fill cannot be split.
    """
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i] % block != 0, -itemsizes[i], i))
    extents = []
    at = 0
    for index in order:
        extents.append(Extent(index, at, at + sizes[index]))
        at += sizes[index]
    return extents
