"""Runs a step's Program by PyTorch's own kernels, node by node.

`StepReplay` runs single nodes; `StepContents` computes Values, each once, and overwrites or frees the memory of those
that nothing reads any more.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ...compat.torch_names import DisableAutocast, DisableTorchDispatch, InferenceMode, schema_of
from ...engine.foreach_chunks import schedule
from ...engine.replay import Replay, last_reads
from ...program.graph import Node, Ref, Value, is_number_type, slice_for
from .kernel_draws import Draws

# Of a list of weights that are updated at a time: what the processor's caches hold.
_LIST_BYTES = 1 << 22

_ATTENTION_OF_CPUS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class StepReplay(Replay):
    """Replays nodes like recipes, and what only steps have: symbolic numbers, and random numbers from a key."""

    def __init__(self, device: torch.device | None = None) -> None:
        """
        Args:
            device: where to run nodes, if not on the recorded device.
        """
        super().__init__(Value.empty if device is None else functools.partial(_empty_on, device))
        self._allocate_result = self.allocate
        self._draws: Draws | None = None  # runs the random operations
        self._device = device

    def _real(self, arg: Any) -> Any:
        return self._device if type(arg) is torch.device and self._device is not None else super()._real(arg)

    def _run_one(self, node: Node) -> None:
        if node.draw is not None and self._draws is not None:
            for value, content in zip(node.outputs, self._draws.run(node, self.buffer), strict=True):
                self.buffers[value] = self.allocate(value).copy_(content.reshape(value.shape))
            return
        if node.op is _ATTENTION_OF_CPUS and self._device is not None:
            self._attention(node)
            return
        if node.op is torch.ops.aten._native_batch_norm_legit_no_training.default:
            # Its backward pass does not read the batch statistics, so they are not computed.
            super()._run_one(node)
            for value in node.outputs[1:]:
                self.buffers[value] = self.allocate(value).fill_(torch.nan)
            return None
        schema = schema_of(node.op).arguments
        numbers = {argument.name for argument in schema if is_number_type(argument.type)}
        numbers |= {argument.name for argument, arg in zip(schema, node.args, strict=False) if _is_number(arg, node)}
        if not numbers or not any(True for _ in node.refs()):
            return super()._run_one(node)
        args = [self._number(a) if s.name in numbers else a for a, s in zip(node.args, schema, strict=False)]
        kwargs = {k: self._number(v) if k in numbers else v for k, v in node.kwargs.items()}
        plain = Node(node.index, node.op, tuple(args), kwargs, node.writes, node.overwrites, node.draw, node.source)
        plain.outputs = node.outputs
        return super()._run_one(plain)

    def _attention(self, node: Node) -> None:
        """Run a node of the CPU's attention kernel by the device's; results for the backward pass are not read."""
        for value in node.reads():
            self.buffer(value)
        arguments = dict(zip((a.name for a in schema_of(node.op).arguments), map(self._real, node.args), strict=False))
        arguments |= {name: self._real(argument) for name, argument in node.kwargs.items()}
        attention = scaled_dot_product_attention(
            arguments["query"],
            arguments["key"],
            arguments["value"],
            attn_mask=arguments.get("attn_mask"),
            dropout_p=arguments.get("dropout_p", 0.0),
            is_causal=arguments.get("is_causal", False),
            scale=arguments.get("scale"),
        )
        self._store_results(node, node.outputs[:1], [attention])
        for value in node.outputs[1:]:
            self.buffers[value] = self.allocate(value).fill_(torch.nan)

    def _number(self, argument: Any) -> Any:
        if type(argument) is Ref:
            return argument.view(self.buffer(argument.value)).item()
        return [self._number(part) for part in argument] if type(argument) in (list, tuple) else argument


def _is_number(arg: Any, node: Node) -> bool:
    """Whether an operand was a number when it was recorded: a tensor of its dtype would have promoted the result."""
    if type(arg) is not Ref or arg.size or node.writes or len(node.outputs) != 1 or node.outputs[0].shape:
        return False
    result = node.outputs[0].dtype
    promotes = torch.promote_types(arg.dtype, result) != result
    return promotes and any(ref.dtype == result for ref in node.refs())


def _empty_on(device: torch.device, value: Value) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)


class StepContents(StepReplay):
    """The content of Values, each computed once.

    Nothing is overwritten, since any Value may still be asked for; see `take` for when that is no longer so.
    """

    def __init__(
        self, inputs: Mapping[Value, Any], seed: Callable[[], np.ndarray], device: torch.device | None = None
    ) -> None:
        """
        Args:
            inputs: the Values that are given, with what `_input` gets their content from.
            seed: returns the two words from which the call's random numbers are derived.
        """
        super().__init__(device)
        self._inputs = inputs
        self._seed = seed
        # While `take` runs: the Values that nothing reads after the node that is run.
        self._last: Sequence[Value] | None = None
        self._own: set[Value] = set()  # whose memory no other Value has, and nobody else

    def _input(self, value: Value) -> torch.Tensor:
        """The content of an input, with its layout; it is not written to."""
        raise NotImplementedError(f"{type(self).__name__} must define _input(value)")

    def of(self, value: Value) -> torch.Tensor:
        """The content of `value`; it must not be modified.

        Raises:
            NotImplementedError: if only a compiler supports an operation.
        """
        nodes = self._missing([value])
        with DisableTorchDispatch(), DisableAutocast(), InferenceMode(False):
            self.run(nodes)
            self._read(value)
            return self.buffer(value)

    def take(self, refs: Sequence[Ref]) -> list[torch.Tensor]:
        """The contents of `refs`, in memory of their own. Nothing else is asked for any more: other memory is
        overwritten or freed, as in eager PyTorch."""
        kept = Counter(ref.value for ref in refs)
        nodes = self._missing(kept)
        needed = {*kept, *(value for node in nodes for value in node.reads())}
        for value in self.buffers.keys() - needed:
            del self.buffers[value]
        contents = []
        with DisableTorchDispatch(), DisableAutocast(), InferenceMode(False), torch.no_grad():
            try:
                for node, self._last in schedule(nodes, last_reads(nodes, kept), _LIST_BYTES):
                    self.run([node])
            finally:
                self._last = None
            for ref in refs:
                self._read(ref.value)
                content = ref.view(self.buffer(ref.value))
                is_own = ref.value in self._own and kept[ref.value] == 1 and ref.whole and content.is_contiguous()
                contents.append(content if is_own else content.clone(memory_format=torch.contiguous_format))
                kept[ref.value] -= 1
                if not kept[ref.value]:
                    del self.buffers[ref.value]
        return contents

    def _missing(self, values: Iterable[Value]) -> list[Node]:
        """The nodes that compute `values` from what is there."""
        nodes = slice_for(values, stop={*self._inputs, *self.buffers})
        random = [node for node in nodes if node.draw is not None] if self._draws is None else []
        if random:
            self._draws = Draws(self._seed(), random)  # compiled before the weights are waited for
        return nodes

    def _read(self, value: Value) -> None:
        """If it is an input, get its content."""
        if value in self._inputs and value not in self.buffers:
            self.buffers[value] = self._input(value)

    def _run_one(self, node: Node) -> None:
        """Run a node; what it writes to is copied before, if something else may need the old content."""
        written = {ref.value for ref in node.writes}
        for value in {*node.reads(), *written}:
            self._read(value)
        last = self._last or ()
        old = {value: self.buffers.get(value) for value in written.difference(self._own.intersection(last))}
        for value in old:
            self.buffers[value] = self.allocate(value) if node.overwrites else self.buffer(value).clone()
        super()._run_one(node)
        self._own.update(node.outputs[: len(node.writes)])
        if self._last is not None:
            self._note_new_memory(node)
        for value, buffer in old.items():
            if buffer is None:
                del self.buffers[value]
            else:
                self.buffers[value] = buffer
        for value in last:
            self.buffers.pop(value, None)

    def _note_new_memory(self, node: Node) -> None:
        """Note which results of a node are in memory of their own, and which operands are no longer."""
        holders: dict[int | None, list[Value]] = {}
        for value in node.reads():
            holders.setdefault(_memory(self.buffers[value]), []).append(value)
        for value in node.outputs[len(node.writes) :]:
            memory = _memory(self.buffers[value])
            others = holders.setdefault(memory, [])
            self._own.difference_update(others)
            if memory is not None and not others:
                self._own.add(value)
            others.append(value)


def _memory(tensor: Any) -> int | None:
    """What identifies the memory of a tensor; None for an unexpected result, and for PyTorch's efficient zeros."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
