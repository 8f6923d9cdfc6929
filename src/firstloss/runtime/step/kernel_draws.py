"""Random operations of a step that PyTorch's kernels run, with the same numbers as in the compiled step.

A compiled step draws its random numbers from a key and the index of each draw, by `jax.random`. So where PyTorch's
kernels run it (`step_replay.py`), its random operations are run by the rules with which it is lowered
(`compiled_draws.py`). Only dropout, of which every form is a `bernoulli_` on a CPU, needs no JAX: the code that
compiled steps call for their random bits (`lower/_threefry.h`) makes its masks, too.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import c_library
from ...interpreter import cores
from ...lower import registry
from ...program.graph import Node, Ref, Value
from ...workers import Workers

if TYPE_CHECKING:
    from .compiled_draws import CompiledDraws

_BY_ONE_THREAD = 1 << 20  # numbers, which take about a millisecond


class Draws:
    """Runs the random operations of one call of a step."""

    def __init__(self, seed: np.ndarray, nodes: Iterable[Node] = ()) -> None:
        """
        Args:
            seed: that of the call.
            nodes: random operations to compile now; others are compiled when they run.
        """
        self._seed = seed
        self._compiled: CompiledDraws | None = None
        compiled = [node for node in nodes if not _is_mask(node)]
        if compiled:
            self._compile(compiled)

    def _compile(self, nodes: Iterable[Node]) -> CompiledDraws:
        from .compiled_draws import CompiledDraws  # imported late, because it imports JAX

        self._compiled = CompiledDraws(self._seed, nodes)
        return self._compiled

    def run(self, node: Node, content_of: Callable[[Value], torch.Tensor]) -> list[torch.Tensor]:
        """Return the content of each of the node's outputs.

        Args:
            content_of: returns the content of what it reads.
        """
        if _is_mask(node):
            return [self._mask(node)]
        return (self._compiled or self._compile(())).run(node, content_of)

    def _mask(self, node: Node) -> torch.Tensor:
        assert node.draw is not None
        library, draw, probability = _library(), node.draw.position.words, float(_probability(node))
        mask = torch.empty(node.outputs[0].shape, dtype=torch.bool)
        seed, address, count = self._seed.ctypes.data, mask.data_ptr(), mask.numel()

        def fill(begin: int) -> None:
            end = min(begin + _BY_ONE_THREAD, count)
            library.firstloss_bernoulli(seed, draw, probability, address, begin, end)

        if count <= _BY_ONE_THREAD:
            fill(0)
        else:
            with Workers(cores(), "firstloss-draws") as workers:
                workers.map(fill, range(0, count, _BY_ONE_THREAD))
        return mask


def _is_mask(node: Node) -> bool:
    """Whether a random operation is that of a dropout, and its mask needs no JAX."""
    if node.op is not torch.ops.aten.bernoulli_.float or type(_probability(node)) not in (float, int):
        return False
    tensor = node.args[0]
    return type(tensor) is Ref and tensor.whole and _library() is not None and _jax_draws_by_default()


def _probability(node: Node) -> Any:
    """The probability of a one."""
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)


def _jax_draws_by_default() -> bool:
    """Whether nobody has told JAX to draw in another way."""
    if "jax" in sys.modules:
        config = getattr(sys.modules["jax"], "config", None)
        if config is None:  # a thread is importing it
            return False
        return bool(config.jax_threefry_partitionable) and config.jax_default_prng_impl == "threefry2x32"
    return not {"JAX_THREEFRY_PARTITIONABLE", "JAX_DEFAULT_PRNG_IMPL"} & os.environ.keys()


@functools.cache
def _library() -> Any:
    """The library with the masks' code; None if it was not built."""
    word, number = ctypes.c_uint32, ctypes.c_int64
    arguments = ctypes.c_void_p, word, ctypes.c_float, ctypes.c_void_p, number, number
    return c_library.load(registry.__file__, "_aten", {"firstloss_bernoulli": (None, arguments)})
