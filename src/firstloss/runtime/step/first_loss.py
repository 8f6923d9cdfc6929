"""The first loss by PyTorch's own kernels, before anything is lowered or compiled.

What a step returns is a slice of its Program, like any weight of its constructor's: the forward pass, mostly. It needs
the weights and no compiler, so it is computed as soon as they are there; the step itself is lowered, compiled and run
behind it. The first loss is then eager PyTorch's, bit for bit, and the training is the compiled step's as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from ...compat.torch_names import DisableTorchDispatch, schema_of
from ...engine.replay import Replay
from ...errors import FirstlossError
from ...program.graph import Node, Ref, Value, slice_for
from ...program.program import Program
from ...program.python_text import is_number
from ..device.lazy import LazyArray
from ..jaxlib import to_device, to_host

# A slice with more than this part of a Program's nodes is no forward pass: the compiled step is as soon there.
_MOST_OF_A_STEP = 0.6


class Kernels(Replay):
    """As recipes are replayed, but for what only steps have: numbers that are inputs, and barriers."""

    def _run_one(self, node: Node) -> None:
        if node.op is torch.ops.firstloss.barrier.default:  # its results are its operands
            for value, ref in zip(node.outputs, node.args[0], strict=True):
                self.buffers[value] = value.empty().copy_(ref.view(self.buffer(ref.value)))
            return
        if node.op is torch.ops.aten._native_batch_norm_legit_no_training.default:
            # It gives no statistics of the batch, which its backward pass is given and does not read.
            super()._run_one(node)
            for value in node.outputs[1:]:
                self.buffers[value] = value.empty().fill_(torch.nan)
            return None
        schema = schema_of(node.op).arguments
        numbers = {argument.name for argument in schema if is_number(argument.type)}
        if not numbers or not any(True for _ in node.refs()):
            return super()._run_one(node)
        args = [self._number(a) if s.name in numbers else a for a, s in zip(node.args, schema, strict=False)]
        kwargs = {k: self._number(v) if k in numbers else v for k, v in node.kwargs.items()}
        plain = Node(node.index, node.op, tuple(args), kwargs, node.writes, node.overwrites, node.draw, node.source)
        plain.outputs = node.outputs
        return super()._run_one(plain)

    def _number(self, argument: Any) -> Any:
        if type(argument) is Ref:
            return argument.view(self.buffer(argument.value)).item()
        return [self._number(part) for part in argument] if type(argument) in (list, tuple) else argument


class FirstLoss:
    """Computes some outputs of a step's Program from its inputs."""

    def __init__(self, program: Program, names: Sequence[str]) -> None:
        self._refs = [program.outputs[name] for name in names]
        inputs = set(program.inputs.values())
        self._nodes = slice_for([ref.value for ref in self._refs], stop=inputs)
        read = {ref.value for node in self._nodes for ref in node.refs()} | {ref.value for ref in self._refs}
        self.inputs = read & inputs
        # What is written in place is a copy.
        self._written = {ref.value for node in self._nodes for ref in node.writes} & inputs
        self._last = _last_reads(self._nodes, self._refs)
        # The random numbers of a step come from its compiled function.
        draws = any(node.draw is not None for node in self._nodes)
        self.possible = bool(names) and not draws and len(self._nodes) <= _MOST_OF_A_STEP * len(program.nodes)

    def attempt(self, given: list[Any], places: Mapping[Any, int]) -> list[jax.Array] | None:
        """As `compute`, of inputs whose `places` in `given` are known; what is lazy there is waited for, and replaced.
        None if PyTorch's kernels cannot do it."""

        def array(value: Value) -> Any:
            content = given[places[value]]
            if type(content) is LazyArray:
                content = given[places[value]] = content.wait()
            return content

        try:
            return self.compute(array)
        except FirstlossError:
            raise
        except Exception:  # an operation that only the compiler knows
            return None

    def compute(self, array: Callable[[Value], Any]) -> list[jax.Array]:
        """The outputs, as arrays of the device's.

        Args:
            array: gives the array for an input; waits for it.
        """
        replay = Kernels()
        with DisableTorchDispatch():
            for node in self._nodes:
                for value in {ref.value for ref in node.refs()} & self.inputs - replay.buffers.keys():
                    found = array(value)
                    content = to_host(found) if isinstance(found, jax.Array) else torch.from_numpy(np.asarray(found))
                    content = content.reshape(value.shape)
                    as_it_is = content.stride() == value.stride and value not in self._written
                    replay.buffers[value] = content if as_it_is else value.empty().copy_(content)
                replay.run([node])
                for value in self._last.get(node.index, ()):
                    replay.buffers.pop(value, None)
            found = [ref.view(replay.buffer(ref.value)).contiguous() for ref in self._refs]
        return [to_device(tensor) for tensor in found]


def _last_reads(nodes: Sequence[Node], kept: Sequence[Ref]) -> dict[int, list[Value]]:
    """By the number of a node, the Values that no later node reads: their memory can be freed."""
    last: dict[Value, int] = {}
    for node in nodes:
        for value in (*(ref.value for ref in node.refs()), *node.outputs):
            last[value] = node.index
    for ref in kept:
        last.pop(ref.value, None)
    found: dict[int, list[Value]] = {}
    for value, index in last.items():
        found.setdefault(index, []).append(value)
    return found
