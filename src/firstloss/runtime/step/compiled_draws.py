"""Random operations of a step that PyTorch's kernels run, by the rules with which they are lowered.

Each is compiled separately, which takes some 50 ms for each kind of operation. See `kernel_draws.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import torch

from ...lower import aten
from ...lower.dtypes import to_jax
from ...lower.program import LoweredCall, call_of
from ...lower.threefry import fold_in
from ...program.graph import Node, Value
from ..jax_support import compile_options, on_cpu, share_memory, to_host, x64
from .functions import step_key


class CompiledDraws:
    """The compiled random operations of a step."""

    def __init__(self, seed: np.ndarray, nodes: Iterable[Node] = ()) -> None:
        """
        Args:
            seed: that of the call.
            nodes: random operations to compile now; others are compiled when they run.
        """
        self._seed = seed
        self._compiled: dict[Any, Any] = {}
        for node in nodes:
            self._run_of(call_of(node))

    def _run_of(self, call: LoweredCall) -> Any:
        run = self._compiled.get(call.kind)
        if run is None:
            run = self._compiled[call.kind] = _compiled(call)
        return run

    def run(self, node: Node, content_of: Callable[[Value], torch.Tensor]) -> list[torch.Tensor]:
        """Return the content of each of the node's outputs.

        Args:
            content_of: returns the content of what it reads.
        """
        call = call_of(node)
        with x64():
            arrays = [share_memory(content_of(value)) for value in call.inputs]
            results = self._run_of(call)(self._seed, np.uint32(call.draw), *arrays)
        return [to_host(result.block_until_ready()) for result in results]


def _compiled(call: LoweredCall) -> Any:
    def run(seed: Any, draw: Any, *arrays: Any) -> tuple[Any, ...]:
        return tuple(call.run(arrays, fold_in(step_key(seed), draw)))

    inputs = [jax.ShapeDtypeStruct(value.shape, to_jax(value.dtype)) for value in call.inputs]
    with x64(), aten.within(on_cpu()):
        seed, draw = jax.ShapeDtypeStruct((2,), np.uint32), jax.ShapeDtypeStruct((), np.uint32)
        return jax.jit(run).lower(seed, draw, *inputs).compile(compile_options(older_emitters=True))
