"""`StepReplay`: runs the nodes of a step's Program by PyTorch's own kernels, one by one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ...compat.torch_names import schema_of
from ...engine.replay import Replay
from ...program.graph import Node, Ref, Value, is_number_type

if TYPE_CHECKING:
    from .kernel_draws import Draws

_ATTENTION_OF_CPUS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class StepReplay(Replay):
    """Replays nodes like recipes, and what only steps have: symbolic numbers, barriers, random numbers from a key."""

    def __init__(self, draws: Draws | None = None, device: torch.device | None = None) -> None:
        """
        Args:
            device: where to run nodes, if not on the recorded device.
        """
        super().__init__(Value.empty if device is None else functools.partial(_empty_on, device))
        self._allocate_result = self.allocate
        self._draws = draws
        self._device = device

    def _real(self, arg: Any) -> Any:
        return self._device if type(arg) is torch.device and self._device is not None else super()._real(arg)

    def _run_one(self, node: Node) -> None:
        if node.draw is not None and self._draws is not None:
            for value, content in zip(node.outputs, self._draws.run(node, self.buffer), strict=True):
                self.buffers[value] = self.allocate(value).copy_(content.reshape(value.shape))
            return
        if node.op is torch.ops.firstloss.barrier.default:  # returns its operands
            for value, ref in zip(node.outputs, node.args[0], strict=True):
                self.buffers[value] = self.allocate(value).copy_(ref.view(self.buffer(ref.value)))
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
