"""Which tensor goes into which file, and at which offset: pure functions of ints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(size: int | str) -> int:
    """Bytes in a size such as 5_000_000, "200MB" (decimal, as Hugging Face has it) or "2GiB" (binary).

    Raises:
        ValueError: if `size` is malformed, or less than a byte.
    """
    if isinstance(size, int):
        count = size
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"{size!r} is not a size: write a number of bytes, or a string such as '200MB' or '5GB'")
        count = int(float(match[1]) * _UNITS[match[2].upper()])
    if count < 1:
        raise ValueError(f"a file of at most {size!r} holds nothing")
    return count


def split(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of the tensors (of `sizes` bytes) of each file, none above `limit` bytes unless it holds one tensor.

    In the given order, as huggingface_hub's `split_torch_state_dict_into_shards`: a tensor above the limit gets a file
    of its own, and the current file continues after it.
    """
    files: list[list[int]] = []
    current: list[int] = []
    held = 0
    for index, size in enumerate(sizes):
        if size > limit:
            files.append([index])
            continue
        if held + size > limit:
            files.append(current)
            current, held = [], 0
        current.append(index)
        held += size
    if current or not files:
        files.append(current)
    return files


def file_names(count: int) -> list[str]:
    """Names of `count` files, as `from_pretrained` expects them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


class Extent(NamedTuple):
    """Where tensor number `which` is: bytes [begin, end) of a file's data."""

    which: int
    begin: int
    end: int


def layout(sizes: Sequence[int], itemsizes: Sequence[int], block: int) -> list[Extent]:
    """The extents of the tensors of one file, without gaps; each is aligned to its element size.

    Tensors that are whole `block`s of bytes come first: a file that is written in blocks then seldom splits a tensor
    where its random fill cannot be split.
    """
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i] % block != 0, -itemsizes[i], i))
    extents = []
    at = 0
    for index in order:
        extents.append(Extent(index, at, at + sizes[index]))
        at += sizes[index]
    return extents
