"""The head of a safetensors file: its length (8 bytes, little-endian), then JSON that says what lies where.

Format: https://github.com/huggingface/safetensors#format. The JSON may end in spaces, which place the data behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import torch

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int], int, int]], metadata: Mapping[str, str], block: int
) -> bytes:
    """The head of a file of `tensors` (name, dtype, shape, begin and end of its bytes), a multiple of `block` long."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, dtype, shape, begin, end in tensors:
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % block)
    return len(text).to_bytes(8, "little") + text
