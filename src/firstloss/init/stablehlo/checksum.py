"""The last line of a module's text, a checksum: a damaged module could compute other weights, or compute forever."""

from __future__ import annotations

import hashlib

_MARK = "// sha256 of the above: "  # a comment of MLIR's


def with_checksum(text: str) -> str:
    """The module's text, with a last line that holds its checksum."""
    text = text if text.endswith("\n") else text + "\n"
    return f"{text}{_MARK}{_digest(text)}\n"


def is_whole(text: str) -> bool:
    """Whether a text is as `with_checksum` returned it."""
    body, mark, digest = text.rpartition(_MARK)
    return bool(mark) and digest == f"{_digest(body)}\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
