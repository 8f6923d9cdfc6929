"""Replay a step's Program with PyTorch's kernels, in the memory of its weights, captured as a CUDA graph.

The nodes call the same kernels of eager PyTorch as the step's Python did, with the same arguments in the same order, so
the bits are the same. In-place operations write to the weights themselves, without copies. Once captured, a single call
launches all kernels.

What cannot be captured is found in the Program beforehand (`ReplayPlan.obstacles`): numbers read from the device,
tensors on another device, random numbers drawn twice, memory read after it has been overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..compat.torch_names import DisableTorchDispatch, schema_of
from ..engine.foreach_chunks import schedule
from ..engine.replay import Replay, last_reads
from ..errors import MaterializeError
from ..program.graph import Node, Ref, Value, is_number_type
from ..program.node_kinds import is_unwritten
from ..program.program import Program

_LIST_BYTES = 1 << 29  # of a list of weights that are updated at a time
_REHEARSED_BYTES = 1 << 26  # of weights and state that a rehearsal copies at most


class ReplayPlan:
    """The schedule of a Program, and whether it can be replayed in place.

    Attributes:
        nodes: in order.
        schedule: the nodes, with the Values to free after each.
        constants: known Values that no node writes to.
        written: known Values that some node writes to.
        obstacles: the reasons why it cannot be replayed in place; empty if it can.
    """

    def __init__(
        self, program: Program, inputs: Iterable[Value], numbers: Iterable[Value], device: torch.device
    ) -> None:
        """
        Args:
            inputs: the Values that each call provides.
            numbers: those of `inputs` that are Python numbers.
            device: of all other tensors.
        """
        self.nodes: list[Node] = program.nodes
        self.outputs = dict(program.outputs)
        given, plain = set(inputs), set(numbers)
        read = {ref.value for node in self.nodes for ref in node.refs()} | {ref.value for ref in self.outputs.values()}
        writes = {ref.value for node in self.nodes for ref in node.writes}
        known = {value for value in read | writes if value.known and value not in given}
        self.written, self.constants = known & writes, known - writes
        frees = last_reads(self.nodes, given | known | {ref.value for ref in self.outputs.values()})
        self.schedule = schedule(self.nodes, frees, _LIST_BYTES)
        self.obstacles: list[str] = [
            *self._on_other_devices(given - plain, device),
            *self._numbers_read(),
            *self._overwritten(),
            *self._draws(device),
        ]

    def _on_other_devices(self, given: set[Value], device: torch.device) -> list[str]:
        moved = [value for value in given if value.device.type != device.type]
        kinds = sorted({f"{list(value.shape)} on {value.device.type}" for value in moved})
        if not kinds:
            return []
        examples = ", ".join(kinds[:3])
        return [f"the step uses tensors that are not on {device.type}: {examples} (for an optimizer's, set fused=True)"]

    def _numbers_read(self) -> list[str]:
        descriptions = []
        for node in self.nodes:
            schema = schema_of(node.op).arguments
            names = {argument.name for argument in schema if is_number_type(argument.type)}
            given = dict(zip((argument.name for argument in schema), node.args, strict=False)) | node.kwargs
            if any(_has_ref(given[name]) for name in names & given.keys()):
                descriptions.append(f"{node.op} at {node.source} takes a number that is in a tensor")
        return descriptions[:3]

    def _overwritten(self) -> list[str]:
        """Reads of a Value after it has been overwritten in place."""
        overwritten: set[Value] = set()
        for node in self.nodes:
            if any(value in overwritten for value in node.reads()):
                return [f"{node.op} at {node.source} reads a tensor that has been overwritten by then"]
            overwritten.update(ref.value for ref in node.writes)
        if any(ref.value in overwritten for ref in self.outputs.values()):
            return ["the step returns a tensor that it has overwritten"]
        return []

    def _draws(self, device: torch.device) -> list[str]:
        before = -1
        for node in self.nodes:
            if node.draw is None:
                continue
            words = node.draw.position.words
            if words <= before:
                return [f"{node.op} at {node.source} draws the same random numbers a second time"]
            if any(value.device.type != device.type for value in node.outputs):
                return [f"{node.op} at {node.source} draws random numbers on another device than {device.type}"]
            before = words
        return []


def _has_ref(argument: Any) -> bool:
    return type(argument) is Ref or type(argument) in (list, tuple) and any(map(_has_ref, argument))


class _InPlaceReplay(Replay):
    """Replays a step, whose random operations draw from PyTorch's generator."""

    def free(self, values: Iterable[Value]) -> None:
        """Free the buffers of Values that are not read again."""
        for value in values:
            self.buffers.pop(value, None)

    def buffer(self, value: Value) -> torch.Tensor:
        """As `Replay.buffer`; a Value that should have been computed must have a buffer."""
        if value not in self.buffers and not value.known and not is_unwritten(value.node):
            raise MaterializeError(f"{value.node} has not been run, or its memory has been freed")
        return super().buffer(value)

    def _run_one(self, node: Node) -> None:
        if schema_of(node.op).name.startswith("aten::_fused_") and type(node.kwargs.get("lr")) is Ref:
            self._run_fused_optimizer(node, node.kwargs["lr"])
            return
        super()._run_one(node)

    def _run_fused_optimizer(self, node: Node, rate: Ref) -> None:
        """On a GPU a fused optimizer reads the learning rate from a float32 tensor."""
        lr = rate.view(self.buffer(rate.value))
        kwargs = {**{k: self._real(v) for k, v in node.kwargs.items()}, "lr": lr.float() if lr.is_cuda else lr}
        for value in node.reads():
            self.buffer(value)
        node.op(*[self._real(a) for a in node.args], **kwargs)
        for ref, value in zip(node.writes, node.outputs, strict=False):
            self.buffers[value] = self.buffers[ref.value]

    def _draw(self, node: Node, draw: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return node.op(*args, **kwargs)

    def _store_results(self, node: Node, values: Sequence[Value], tensors: Sequence[torch.Tensor | None]) -> None:
        """The seeds and masks that attention saves for its backward kernel may differ from its meta kernel's."""
        if not schema_of(node.op).name.startswith("aten::_scaled_dot_product"):
            return super()._store_results(node, values, tensors)
        for value, tensor in zip(values, tensors, strict=False):
            if value.dtype.is_floating_point and value.numel:
                super()._store_results(node, [value], [tensor])
            else:
                self.buffers[value] = tensor  # type: ignore[assignment]


class ReplayedStep:
    """Runs a step's Program on the memory of one set of weights.

    Attributes:
        how: "replay" or "graph": how the last call was run.
        failed: why capturing the graph failed, if it did.
    """

    def __init__(
        self, plan: ReplayPlan, inputs: Sequence[Value], state: Mapping[Value, Ref], device: torch.device
    ) -> None:
        """
        Args:
            inputs: in the order of an equivalent executable's inputs.
            state: the new content of each input that the step changes.
        """
        assert not plan.obstacles, plan.obstacles
        self.inputs = tuple(inputs)
        self._plan = plan
        self._state = dict(state)
        self._device = device
        self.how: str = "replay"
        self.failed: str | None = None
        self.tried: bool = False  # whether `rehearse` has been called
        self._calls = 0
        self._static_inputs: dict[Value, torch.Tensor] = {}
        self._constants: dict[Value, torch.Tensor] = {}
        self._graph: Any = None
        self._static_outputs: dict[str, torch.Tensor] = {}
        self._recorded: tuple[Any, ...] = ()

    def __call__(
        self,
        in_place: Mapping[Value, torch.Tensor],
        batch: Mapping[Value, torch.Tensor],
        numbers: Mapping[Value, Callable[[], float]],
    ) -> dict[str, torch.Tensor]:
        """Run the step; returns its outputs, in memory that the caller owns.

        Args:
            in_place: weights and state, which the step updates in place, and tensors from outside.
            batch: the arguments of this call.
            numbers: functions that return the Python numbers of this call.
        """
        with torch.no_grad(), DisableTorchDispatch():
            given = self._inputs(in_place, batch, numbers)
            address = tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in given.values())
            if self._is_gpu and self._calls and self.failed is None and self._recorded != address:
                self._record(given, address)
            self._calls += 1
            if self._graph is not None and self._recorded == address:
                self.how = "graph"
                self._graph.replay()
                return {name: tensor.clone() for name, tensor in self._static_outputs.items()}
            self.how = "replay"
            return self._execute(given)

    @property
    def _is_gpu(self) -> bool:
        return self._device.type == "cuda"

    def rehearse(
        self,
        in_place: Mapping[Value, torch.Tensor],
        batch: Mapping[Value, torch.Tensor],
        numbers: Mapping[Value, Callable[[], float]],
    ) -> dict[str, torch.Tensor]:
        """Run the step up to the update of the weights, without side effects; returns the outputs computed so far.

        Raises PyTorch's error if a kernel does not support its arguments.
        """
        self.tried = True
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.no_grad(), DisableTorchDispatch(), torch.random.fork_rng(devices=devices):
            given = self._inputs(in_place, batch, numbers)
            kernels, copied, spent = self._begin(given), 0, set(given)
            for node, frees in self._plan.schedule:
                for ref in node.writes:
                    if ref.value in spent:
                        copied += ref.value.nbytes
                        if copied <= _REHEARSED_BYTES:
                            kernels.buffers[ref.value] = kernels.buffer(ref.value).clone()
                        spent.discard(ref.value)
                if copied > _REHEARSED_BYTES:
                    break
                kernels.run((node,))
                kernels.free(frees)
            refs = {name: ref for name, ref in self._plan.outputs.items() if ref.value in kernels.buffers}
            self._calls += 1
            return {name: ref.view(kernels.buffers[ref.value]).clone() for name, ref in refs.items()}

    def _inputs(
        self,
        in_place: Mapping[Value, torch.Tensor],
        batch: Mapping[Value, torch.Tensor],
        numbers: Mapping[Value, Callable[[], float]],
    ) -> dict[Value, torch.Tensor]:
        given = dict(in_place)
        for value, tensor in batch.items():
            given[value] = self._static_input(value).copy_(tensor, non_blocking=True)
        for value, read in numbers.items():
            given[value] = self._static_input(value).fill_(read())
        if not self._constants:
            for value in (*self._plan.constants, *self._plan.written):
                self._constants[value] = value.content().detach().clone()
        return given

    def _begin(self, given: Mapping[Value, torch.Tensor]) -> _InPlaceReplay:
        kernels = _InPlaceReplay()
        kernels.buffers.update(given)
        for value, content in self._constants.items():
            kernels.buffers[value] = content.clone() if value in self._plan.written else content
        return kernels

    def _static_input(self, value: Value) -> torch.Tensor:
        """The memory from which the captured kernels read an argument."""
        memory = self._static_inputs.get(value)
        if memory is None:
            memory = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=self._device)
            self._static_inputs[value] = memory
        return memory

    def _execute(self, given: Mapping[Value, torch.Tensor]) -> dict[str, torch.Tensor]:
        kernels = self._begin(given)
        for node, frees in self._plan.schedule:
            kernels.run((node,))
            kernels.free(frees)
        input_memory = {tensor.untyped_storage().data_ptr() for tensor in given.values()}
        copies = []
        for value, new in self._state.items():
            target, new_content = given[value], kernels.buffer(new.value)
            if new_content.data_ptr() != target.data_ptr() or new_content.stride() != target.stride():
                view = new.view(new_content)
                copies.append(
                    (target, view.clone() if new_content.untyped_storage().data_ptr() in input_memory else view)
                )
        for target, new_content in copies:
            target.copy_(new_content)
        outputs = {}
        for name, ref in self._plan.outputs.items():
            new_content = ref.view(kernels.buffer(ref.value))
            shared = new_content.untyped_storage().data_ptr() in input_memory or ref.value in self._constants
            outputs[name] = new_content.clone() if shared else new_content
        return outputs

    def _record(self, given: Mapping[Value, torch.Tensor], address: tuple[Any, ...]) -> None:
        """Capture the kernels as a graph, without running them; if that fails, they are replayed."""
        self._graph, self._static_outputs, self._recorded = None, {}, ()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._static_outputs = self._execute(given)
        except Exception as error:  # an operation synchronizes, or does not support graphs
            self.failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self._static_outputs = {}
            torch.cuda.synchronize(self._device)
            return
        self._graph, self._recorded = graph, address
