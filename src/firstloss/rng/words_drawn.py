"""How many words of the CPU stream each random operation draws.

Facts about PyTorch's CPU kernels (ATen/native/cpu/DistributionTemplates.h), found by experiment; the experiments are
`tests/rng/test_words_drawn.py`. They have been run on torch 2.11, 2.12, 2.13 and 2.15, and would find a difference in
another version. A rule is stated only where the words drawn follow from operation, dtype and size. Where they depend
on values (rejection, as in gamma, Poisson and binomial samples) or have not been proved, the answer is None: run the
operation to find out.

Three kinds of kernel:
* element by element, a fixed number of words each: uniform, random, bernoulli, exponential, cauchy, geometric;
* `normal` into 16 contiguous elements or more: blocks of 16 uniforms make 16 normals. A ragged end is made by a whole
  block that overwrites the last 16 elements;
* any other normal: pairs of doubles, the second of which the generator caches for the next such kernel.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple

from firstloss.rng.stream import Position

# 32-bit words in one uniform of a dtype (its bits are fewer: 11, 8, 24 and 53).
_UNIFORM_WORDS = {"float16": 1, "bfloat16": 1, "float32": 1, "float64": 2}
_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}  # drawn as twice as many of these
_LARGEST = {"bool": 1, "uint8": 255, "int8": 127, "int16": 32767, "int32": (1 << 31) - 1, "int64": (1 << 63) - 1}
_DTYPES = {*_UNIFORM_WORDS, *_LARGEST}

# Factories draw as the in-place fill of their result does.
_FILL_OF = {
    "rand": "uniform",
    "rand_like": "uniform",
    "randn": "normal",
    "randn_like": "normal",
    "randint": "random",
    "randint_like": "random",
}
# Kernels that draw one double for each element, and for which dtypes they exist.
_DOUBLE_EACH = {
    "exponential": set(_UNIFORM_WORDS),
    "cauchy": set(_UNIFORM_WORDS),
    "geometric": _DTYPES - {"bool"},
    "native_dropout": set(_UNIFORM_WORDS),
}

MIN_PIECE = 16  # elements in the smallest piece that a fill may be split into: fewer normals take the other path
_BLOCK = 16  # normals made at a time


class WordsDrawn(NamedTuple):
    """What an operation takes from the stream.

    words: how many 32-bit words.
    spare: what becomes of the generator's cached normal. "keep": it is left as it was; None: afterwards there is none;
        an int: the second of the pair drawn so many words after the operation's begin is cached.
    """

    words: int
    spare: int | Literal["keep"] | None = "keep"


def draw(
    op: str, dtype: str, numel: int, *, contiguous: bool = True, spare: bool = False, **op_args: Any
) -> WordsDrawn | None:
    """What `op` draws, or None where only running it tells.

    Args:
        op: the ATen operation's base name without trailing underscore, as "normal" or "randint".
        dtype: of the tensor filled or returned, as "float32".
        numel: its elements.
        contiguous: whether it is (`Tensor.is_contiguous()`).
        spare: whether a normal is cached in the generator when the operation begins.
        op_args: the operation's plain arguments by their schema's names (with `from_` for `from`), and `NAME_dtype` for
            each tensor argument. Looked at: the bounds of random and randint, the probability of bernoulli, `train`.
    """
    if _FILL_OF.get(op, op) == "normal":
        return _normal(dtype, numel, contiguous, spare)
    if op == "log_normal":
        return _pairs(numel, spare) if dtype in _UNIFORM_WORDS else None
    if op == "randperm":
        # Below 2^32 / 20 elements an index is one word. Beyond that it has not been tested.
        return WordsDrawn(max(0, numel - 1)) if numel < (1 << 32) // 20 else None
    if op == "native_dropout" and op_args.get("train") is False:
        return WordsDrawn(0)
    each = _words_each(op, dtype, op_args)
    return None if each is None else WordsDrawn(each * numel)


def advance(position: Position, drawn: WordsDrawn) -> Position:
    """Where the stream stands after an operation that began at `position`."""
    if drawn.spare == "keep":
        return Position(position.words + drawn.words, position.spare)
    spare = None if drawn.spare is None else position.words + drawn.spare
    return Position(position.words + drawn.words, spare)


def granule(op: str, dtype: str, **op_args: Any) -> int | None:
    """Where a contiguous fill may be split.

    If each of its consecutive pieces begins at a multiple of the granule (in elements) and has at least MIN_PIECE
    elements, the same operation on each piece, from the stream's state at that piece (`words_before`), gives the bytes
    of the whole; arguments that are tensors are split alike. None: it may not be split.
    """
    if _FILL_OF.get(op, op) == "normal":
        return _BLOCK // 2 if dtype in _REAL else _BLOCK if dtype in _UNIFORM_WORDS else None
    return None if op == "native_dropout" or _words_each(op, dtype, op_args) is None else 1


def words_before(op: str, dtype: str, offset: int, **op_args: Any) -> int:
    """Words that a splittable fill draws before the piece that begins at element `offset`."""
    unit = granule(op, dtype, **op_args)
    if unit is None or offset % unit:
        raise ValueError(f"a {dtype} {op} cannot be split at element {offset}: its granule is {unit}")
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
        # A block is made in float32 beside the tensor, so uniforms for the ragged end are drawn once,
        return WordsDrawn(numel + (_BLOCK - ragged if ragged else 0))
    # while here the tensor is filled with uniforms first, and its last 16 elements once more.
    return WordsDrawn((numel + (_BLOCK if ragged else 0)) * _UNIFORM_WORDS[dtype])


@cache
def _torch_version() -> tuple[int, int]:
    """Of the torch installed, without importing it: this package is arithmetic only."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:  # a build without metadata: assume a recent one
        return (2, 13)
    return int(major), int(minor)


def _pairs(numel: int, spare: bool) -> WordsDrawn:
    """Normals one by one: a cached one first, then pairs from two doubles (4 words) each."""
    if numel == 0:
        return WordsDrawn(0)
    pairs, single = divmod(numel - spare, 2)
    return WordsDrawn(4 * (pairs + single), 4 * pairs if single else None)


def _words_each(op: str, dtype: str, op_args: dict[str, Any]) -> int | None:
    """Words that an element-by-element kernel draws for each element; None if it is none or unknown."""
    op = _FILL_OF.get(op, op)
    if op == "uniform":
        return 2 * _UNIFORM_WORDS[_REAL[dtype]] if dtype in _REAL else _UNIFORM_WORDS.get(dtype)
    if dtype not in _DTYPES:
        return None
    if op in _DOUBLE_EACH:
        return 2 if dtype in _DOUBLE_EACH[op] else None
    if op == "bernoulli":
        # A number p is compared with a double, a tensor's element with a uniform of that tensor's precision. Without p
        # it is either bernoulli_() with the default p, or bernoulli(self), whose probabilities are in self.
        if "p_dtype" in op_args:
            return _UNIFORM_WORDS.get(op_args["p_dtype"])
        return 2 if "p" in op_args or dtype == "float64" else None
    if op == "random":
        return _random_words(dtype, op_args)
    return None


def _random_words(dtype: str, op_args: dict[str, Any]) -> int | None:
    """`random_` and `randint`: one word where the range is below 2^28, else two."""
    if "low_dtype" in op_args or "high_dtype" in op_args:
        return None  # bounds in tensors
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
    numbers = end - (begin or 0)
    if numbers < 1 << 28:
        return 1
    # Bounds that a floating dtype cannot represent are moved inwards first, which may bring the range below 2^28.
    return 2 if dtype in _LARGEST else None
