"""How many words of the CPU stream each random operation draws.

These rules describe PyTorch's CPU kernels (ATen/native/cpu/DistributionTemplates.h) and were found by experiment:
`tests/rng/test_words_drawn.py`, which has been run on torch 2.11, 2.12, 2.13 and 2.15 and fails where a version
differs. There is a rule only where operation, dtype and size determine the number of words. If it depends on values
(rejection sampling, as for gamma, Poisson and binomial) or has not been verified, the answer is None: the operation has
to be run.

There are three kinds of kernels:
* elementwise, with a fixed number of words per element: uniform, random, bernoulli, exponential, cauchy, geometric;
* `normal` on 16 contiguous elements or more: blocks of 16 uniforms become 16 normals. If the size is not a multiple of
  16, another whole block overwrites the last 16 elements;
* any other normal: pairs of doubles, the second of which the generator caches for the next such kernel.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple

from firstloss.rng.stream import Position

# 32-bit words drawn for one uniform of a dtype (which uses 11, 8, 24 and 53 bits of them).
_UNIFORM_WORDS = {"float16": 1, "bfloat16": 1, "float32": 1, "float64": 2}
_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}  # drawn as pairs of these
_LARGEST = {"bool": 1, "uint8": 255, "int8": 127, "int16": 32767, "int32": (1 << 31) - 1, "int64": (1 << 63) - 1}
_DTYPES = {*_UNIFORM_WORDS, *_LARGEST}

# Factories draw like the in-place fill of their result.
_FILL_OF = {
    "rand": "uniform",
    "rand_like": "uniform",
    "randn": "normal",
    "randn_like": "normal",
    "randint": "random",
    "randint_like": "random",
}
# Kernels that draw one double per element, and the dtypes that they support.
_DOUBLE_EACH = {
    "exponential": set(_UNIFORM_WORDS),
    "cauchy": set(_UNIFORM_WORDS),
    "geometric": _DTYPES - {"bool"},
    "native_dropout": set(_UNIFORM_WORDS),
}

MIN_PIECE = 16  # elements in the smallest piece that a fill may be split into: fewer normals use another kernel
_BLOCK = 16  # normals computed together


class WordsDrawn(NamedTuple):
    """What an operation draws from the stream.

    words: the number of 32-bit words.
    spare: the effect on the generator's cached normal. "keep": unchanged; None: afterwards there is none; an int: the
        second normal of the pair drawn this many words after the operation's beginning.
    """

    words: int
    spare: int | Literal["keep"] | None = "keep"


def draw(
    op: str, dtype: str, numel: int, *, contiguous: bool = True, spare: bool = False, **op_args: Any
) -> WordsDrawn | None:
    """What `op` draws; None if it has to be run to find out.

    Args:
        op: the ATen operation's base name without trailing underscore, such as "normal" or "randint".
        dtype: of the tensor filled or returned, such as "float32".
        numel: its number of elements.
        contiguous: whether it is contiguous (`Tensor.is_contiguous()`).
        spare: whether a normal is cached in the generator when the operation begins.
        op_args: the operation's non-tensor arguments by the names of its schema (`from_` for `from`), and `NAME_dtype`
            for each tensor argument. Used are the bounds of random and randint, the probability of bernoulli, `train`.
    """
    if _FILL_OF.get(op, op) == "normal":
        return _normal(dtype, numel, contiguous, spare)
    if op == "log_normal":
        return _pairs(numel, spare) if dtype in _UNIFORM_WORDS else None
    if op == "randperm":
        # Below 2^32 / 20 elements an index takes one word. Larger ones have not been tested.
        return WordsDrawn(max(0, numel - 1)) if numel < (1 << 32) // 20 else None
    if op == "native_dropout" and op_args.get("train") is False:
        return WordsDrawn(0)
    each = _words_each(op, dtype, op_args)
    return None if each is None else WordsDrawn(each * numel)


def advance(position: Position, drawn: WordsDrawn) -> Position:
    """The position after an operation that began at `position`."""
    if drawn.spare == "keep":
        return Position(position.words + drawn.words, position.spare)
    spare = None if drawn.spare is None else position.words + drawn.spare
    return Position(position.words + drawn.words, spare)


def granule(op: str, dtype: str, **op_args: Any) -> int | None:
    """The granularity, in elements, at which a contiguous fill may be split; None if it may not.

    If each piece begins at a multiple of it and has at least MIN_PIECE elements, running the operation on each piece,
    from the stream's state at that piece (`words_before`), gives the bytes of the whole. Tensor arguments are split
    in the same way.
    """
    if _FILL_OF.get(op, op) == "normal":
        return _BLOCK // 2 if dtype in _REAL else _BLOCK if dtype in _UNIFORM_WORDS else None
    return None if op == "native_dropout" or _words_each(op, dtype, op_args) is None else 1


def words_before(op: str, dtype: str, offset: int, **op_args: Any) -> int:
    """The words that a splittable fill draws before the piece that begins at element `offset`."""
    unit = granule(op, dtype, **op_args)
    if unit is None or offset % unit:
        raise ValueError(f"a {dtype} {op} cannot be split at element {offset}: its granularity is {unit}")
    if _FILL_OF.get(op, op) == "normal":
        return offset * _UNIFORM_WORDS[_REAL.get(dtype, dtype)] * (2 if dtype in _REAL else 1)
    return offset * (_words_each(op, dtype, op_args) or 0)


def _normal(dtype: str, numel: int, contiguous: bool, spare: bool) -> WordsDrawn | None:
    if dtype in _REAL:
        dtype, numel = _REAL[dtype], 2 * numel
    if dtype not in _UNIFORM_WORDS:
        return None
    if numel < MIN_PIECE or not contiguous:
        return _pairs(numel, spare)
    ragged = numel % _BLOCK
    if dtype in ("float16", "bfloat16") and _torch_version() >= (2, 12):
        # Blocks are computed in a float32 buffer, so uniforms for the incomplete block are drawn once.
        return WordsDrawn(numel + (_BLOCK - ragged if ragged else 0))
    # The tensor is filled with uniforms first; if the size is ragged, those of its last 16 elements are redrawn.
    return WordsDrawn((numel + (_BLOCK if ragged else 0)) * _UNIFORM_WORDS[dtype])


@cache
def _torch_version() -> tuple[int, int]:
    """The version of torch, without importing it: this package depends on NumPy only."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:  # a build without metadata: assume a recent one
        return (2, 13)
    return int(major), int(minor)


def _pairs(numel: int, spare: bool) -> WordsDrawn:
    """Normals one by one: a cached one first, then pairs, each from two doubles (4 words)."""
    if numel == 0:
        return WordsDrawn(0)
    pairs, single = divmod(numel - spare, 2)
    return WordsDrawn(4 * (pairs + single), 4 * pairs if single else None)


def _words_each(op: str, dtype: str, op_args: dict[str, Any]) -> int | None:
    """The words that an elementwise kernel draws per element; None for other kernels."""
    op = _FILL_OF.get(op, op)
    if op == "uniform":
        return 2 * _UNIFORM_WORDS[_REAL[dtype]] if dtype in _REAL else _UNIFORM_WORDS.get(dtype)
    if dtype not in _DTYPES:
        return None
    if op in _DOUBLE_EACH:
        return 2 if dtype in _DOUBLE_EACH[op] else None
    if op == "bernoulli":
        # A number p is compared with a double, an element of a tensor p with a uniform of the tensor's precision.
        # Without p it is either bernoulli_() with the default p, or bernoulli(self), whose probabilities are in self.
        if "p_dtype" in op_args:
            return _UNIFORM_WORDS.get(op_args["p_dtype"])
        return 2 if "p" in op_args or dtype == "float64" else None
    if op == "random":
        return _random_words(dtype, op_args)
    return None


def _random_words(dtype: str, op_args: dict[str, Any]) -> int | None:
    """`random_` and `randint`: one word if the range is below 2^28, else two."""
    if "low_dtype" in op_args or "high_dtype" in op_args:
        return None  # the bounds are tensors
    begin = op_args.get("from_", op_args.get("low"))
    end = op_args.get("to", op_args.get("high"))
    if begin is None and end is None:
        return 2 if dtype in ("int64", "float64") else 1
    if begin == -(1 << 63) and end is None:
        return 2
    if end is None:
        if dtype not in _LARGEST:
            return None
        end = _LARGEST[dtype] + 1
    if end - (begin or 0) < 1 << 28:
        return 1
    # Bounds that a floating dtype cannot represent are moved inwards first, which may reduce the range below 2^28.
    return 2 if dtype in _LARGEST else None
