"""Record random operations: the stream position of each, and how far it advances the stream."""

from __future__ import annotations

import math

import torch

from ..compat.torch_names import DisableTorchDispatch, schema_of
from ..errors import CaptureError
from ..program.graph import Draw, Geometry, Node, dtype_name, is_contiguous
from ..program.node_kinds import has_counter_rule, with_generator
from ..rng import words_drawn
from ..rng.counter_stream import CounterStream, next_draw
from ..rng.stream import DeferredOffsetStream, Position, Stream
from . import session
from .op_call import OpCall


def draws_at_all(call: OpCall) -> bool:
    """Whether the call draws; attention does only with dropout."""
    name = schema_of(call.op).name
    return not name.startswith("aten::_scaled_dot_product") or call.plain_arguments().get("dropout_p", 0.0) != 0.0


def record_draw(call: OpCall, node: Node, geometry: list[Geometry] | None) -> bool:
    """Give `node` its stream position and advance the generator; returns False if it is not known how far."""
    with session.generators.lock:
        return _record_draw(call, node, geometry)


def _record_draw(call: OpCall, node: Node, geometry: list[Geometry] | None) -> bool:
    if node.writes:
        target = node.writes[0]
        size, dtype, device = target.size, target.dtype, target.value.device
        dense = is_contiguous(target.size, target.stride)
    elif geometry:
        size, stride, _, dtype = geometry[0]
        device = call.device()
        dense = is_contiguous(size, stride)
    else:
        return False
    if device.type == "cuda" and not (session.generators.policy == "counter" and has_counter_rule(node.op)):
        from .cuda_random_ops import record_on_gpu

        generator_argument = call.generator_argument()
        return record_on_gpu(node, call.traits.random or "", math.prod(size), dtype, device, generator_argument)
    generator = call.generator()
    counted = session.generators.policy == "counter" and has_counter_rule(node.op) and generator.device.type == "cpu"
    if not counted:
        check_device(node, device, generator)
    stream, position = session.generators.locate(generator)
    if isinstance(stream, CounterStream):
        _record_counted(node, generator, stream, position, math.prod(size), dtype)
        return True
    if call.op.namespace == "firstloss":
        _record_rejection(node, generator, stream, position)
        return True
    if with_generator(call.op) is None:  # it could not be run later from this position
        return False
    drawn = words_drawn.draw(
        call.traits.random or "",
        dtype_name(dtype),
        math.prod(size),
        contiguous=dense,
        spare=position.spare is not None,
        **call.plain_arguments(),
    )
    if drawn is None:
        return False
    after = words_drawn.advance(position, drawn)
    node.draw = Draw(stream, position, after)
    session.generators.move(generator, stream, after)
    if not session.depth:
        session.generators.restore_states()
    return True


def _record_counted(
    node: Node, generator: torch.Generator, stream: CounterStream, position: Position, numel: int, dtype: torch.dtype
) -> None:
    """Record an operation under the counter policy, where each has its own range of the stream."""
    from ..engine.counter_fill import words_of

    node.draw = Draw(stream, position, Position(position.words + words_of(numel, dtype)))
    session.generators.move(generator, stream, next_draw(position))
    if not session.depth:
        session.generators.restore_states()


def _record_rejection(node: Node, generator: torch.Generator, stream: Stream, position: Position) -> None:
    """Record a `trunc_normal_`; later operations draw from a `DeferredOffsetStream` after it."""
    from ..engine.rejection import Rejection

    _, mean, std, a, b = node.args[:5]
    dtype, numel = node.writes[0].dtype, math.prod(node.writes[0].size)
    with DisableTorchDispatch():
        low, high = (torch.tensor(bound, dtype=dtype).item() for bound in (a, b))
    rejection = Rejection(stream, position, numel, dtype, mean, std, low, high)
    after = Position(position.words + rejection.words_a_round, position.spare)
    node.draw = Draw(stream, position, after, rejection)
    following = DeferredOffsetStream(stream, position, rejection.words)
    session.generators.move(generator, following, following.start)
    if not session.depth:
        session.generators.restore_states()


def check_device(node: Node, device: torch.device, generator: torch.Generator) -> None:
    """Refuse devices other than CPU and CUDA, and generators of another device."""
    if device.type == "meta":
        raise CaptureError(
            f"{node.source}: {node.op} initializes a weight that has been moved to the meta device in a deferred "
            "block, where operations are not recorded. Remove what moves weights there (accelerate's "
            "init_empty_weights, .to('meta')): firstloss.deferred replaces it."
        )
    if device.type != "cpu" or generator.device.type != "cpu":
        raise CaptureError(
            f"{node.source}: {node.op} draws on device '{device}'. Random operations are captured on the CPU and on "
            f"CUDA devices only: construct on the CPU, and pass device='{device}' to firstloss.materialize_module."
        )
