"""Control flow inside a step: `torch.cond`, `torch.while_loop` and `scan`, captured as nested Programs.

A branch or a loop's body is a *region*: its Python is traced once, and tensors from outside that it reads (weights,
tensors of the step) are *lifted* to arguments. In the step's Program the whole is one operation, `firstloss::region`,
which `lower/control_flow.py` lowers.

A region is differentiated by running its Python again with autograd on, inside a region of the backward pass: only the
arguments are saved, as with `torch.utils.checkpoint`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..compat.patches import replaces
from ..compat.torch_names import DisableTorchFunction, pytree
from ..errors import TraceError
from ..program import regions
from ..program.program import Program
from ..program.regions import FLOWS, Flow, Region
from ..program.source import here
from . import session
from .tensor import DeferredTensor

Tensor = torch.Tensor


_numbers: dict[Any, int] = {}  # by `_identity`: retracing a step gives the same numbers


class _Lift(TorchFunctionMode):
    """Replaces tensors from outside by arguments of the region, and records them."""

    def __init__(self, trace: Any, lifted: dict[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._trace = trace
        self.lifted = lifted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(self._local, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _local(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or type(x) is DeferredTensor and x._storage.trace is self._trace:
            return x
        with DisableTorchFunction():
            entry = self.lifted.get(id(x))
            if entry is None:
                local = self._trace.new_input(x, f"lifted{len(self.lifted)}")
                if x.requires_grad:
                    local.requires_grad_()
                entry = self.lifted[id(x)] = (x, local)
            return entry[1]


def capture(
    function: Callable[..., Any], like: Sequence[Tensor], lifted: Sequence[Tensor] = ()
) -> tuple[Region, list[Tensor]]:
    """Trace `function` on tensors shaped like those of `like`; `lifted` are tensors from outside known to be read.

    Returns:
        the region, and all tensors from outside that it reads.
    """
    from .step import StepTrace  # which builds on the recorder, as this does

    tracing = StepTrace()
    active = tracing.active()
    with active, active:
        operands = [tracing.new_input(x, f"operand{i}") for i, x in enumerate(like)]
        outside = [tracing.new_input(x, f"lifted{i}") for i, x in enumerate(lifted)]
        inputs = [x._storage.value for x in (*operands, *outside)]
        lift = _Lift(tracing, {id(x): (x, local) for x, local in zip(lifted, outside, strict=True)})
        with lift:
            results = function(*operands)
        results = [results] if isinstance(results, Tensor) else list(results)
        results = [_as_local(lift, x) for x in results]
        also_lifted = list(lift.lifted.values())[len(outside) :]
        outputs = {f"out{i}": x._ref() for i, x in enumerate(results)}
    inputs += [value for value in tracing.inputs if any(tracing.inputs[value] is x for x, _ in also_lifted)]
    locals_: list[Any] = [*operands, *outside, *(local for _, local in also_lifted)]
    if any(x._storage.value is not v for x, v in zip(locals_, inputs, strict=True)):
        raise TraceError(
            f"{here()}: a branch or loop body writes to a tensor from outside of it. Return the new value instead."
        )
    if tracing.closures:
        raise TraceError(
            f"{tracing.closures[0].source}: a step closure or an assertion is not supported in a branch or loop body. "
            "Return its tensors from there, and call it outside."
        )
    program = Program({v.label or "in": v for v in inputs}, outputs)
    read = {value for node in program.nodes for value in node.reads()}
    if read & set(tracing.inputs) - set(inputs):
        raise TraceError(f"{here()}: a branch or loop body reads a tensor in a way that capture does not support.")
    kinds = [(tuple(x.shape), x.dtype) for x in results]
    lifted = [*lifted, *(x for x, _ in also_lifted)]
    return Region(program, inputs, len(lifted), kinds, tracing.draws), lifted


def _as_local(lift: _Lift, x: Any) -> DeferredTensor:
    if not isinstance(x, Tensor):
        x = torch.tensor(x)
    x = lift._local(x)
    assert type(x) is DeferredTensor
    return x


def run(flow: Flow, operands: Sequence[Tensor], lifted: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """Record `flow` as one operation of the step; `lifted` are the tensors from outside, of each region."""
    number = _numbers.setdefault(_identity(flow), len(_numbers))
    FLOWS.setdefault(number, flow)
    draws = any(region.draws for region in flow.regions)
    op = regions.region_that_draws if draws else regions.region
    return op([*operands, *itertools.chain(*lifted)], number)


def _identity(flow: Flow) -> Any:
    """Equal for flows that compute the same."""
    texts = []
    for region in flow.regions:
        constant_tensors = [v.real for node in region.program.nodes for v in node.reads() if v.real is not None]
        constants = tuple(str(x.dtype) + str(x.tolist()) for x in constant_tensors)
        texts.append((str(region.program), constants, len(region.inputs), tuple(region.outputs)))
    return flow.kind, tuple(texts), flow.carried, flow.scanned, flow.reverse, tuple(flow.outputs)


class _GeneratorState:
    """The position in the step's random stream, to repeat the same draws."""

    def __init__(self) -> None:
        self._state = torch.get_rng_state()  # the trace's own, while one is under way

    def with_same_draws(self, function: Callable[..., Any], *args: Any) -> Any:
        after = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            return function(*args)
        finally:
            torch.set_rng_state(after)


def differentiated(
    function: Callable[..., Any], tensors: Sequence[Tensor], lifted: Sequence[Tensor], count: int
) -> Callable[..., Any]:
    """A function of (tensors, lifted, gradients of the outputs) that returns the gradients of tensors and lifted."""
    requires_grad = [x.requires_grad for x in (*tensors, *lifted)]

    def backward(*args: Tensor) -> list[Tensor]:
        inputs, grads = args[: len(requires_grad)], args[len(requires_grad) :]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(w) for x, w in zip(inputs, requires_grad, strict=True)]
            local_tensors, outside = leaves[: len(tensors)], leaves[len(tensors) :]
            local_by_id = {id(x): (x, local) for x, local in zip(lifted, outside, strict=True)}
            with _Lift(session.trace, local_by_id):
                outputs = function(*local_tensors)
            outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if isinstance(y, Tensor) and y.requires_grad]
            targets = [x for x in leaves if x.requires_grad]
            gradients = iter(
                torch.autograd.grad([y for y, _ in pairs], targets, [g for _, g in pairs], allow_unused=True)
                if pairs
                else [None] * len(targets)
            )
        out = []
        for x in leaves:
            g = next(gradients) if x.requires_grad else None
            out.append(torch.zeros_like(x) if g is None else g)
        return [g for g, w in zip(out, requires_grad, strict=True) if w]

    return backward


# -- torch.cond --


def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Tensor]) -> Any:
    """`torch.cond` in a step."""
    single = False

    def flat(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Tensor) -> Any:
            nonlocal single
            result = function(*args)
            single = isinstance(result, Tensor)
            return [result] if single else list(result)

        return call

    if not isinstance(pred, Tensor):
        return true_fn(*operands) if pred else false_fn(*operands)
    out = _Cond.apply(
        pred.reshape(()),
        flat(true_fn),
        flat(false_fn),
        len(operands),
        *_with_lifted((flat(true_fn), flat(false_fn)), operands),
    )
    return out[0] if single else out


def _with_lifted(functions: Sequence[Callable[..., Any]], operands: Sequence[Tensor]) -> list[Tensor]:
    """The operands and all tensors that the functions read, for autograd."""
    lifted: list[Tensor] = []
    for function in functions:
        _, lifted = capture(function, operands, lifted)
    return [*operands, *lifted]


class _Cond(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pred, true_fn, false_fn, count, *tensors):
        ctx.functions, ctx.count, ctx.state = (true_fn, false_fn), count, _GeneratorState()
        ctx.save_for_backward(pred, *tensors)
        return tuple(_record_cond(pred, ctx.functions, tensors[:count], tensors[count:]))

    @staticmethod
    def backward(ctx, *grads):
        pred, *tensors = ctx.saved_tensors
        operands, lifted = tensors[: ctx.count], tensors[ctx.count :]
        backwards = [differentiated(f, operands, lifted, len(grads)) for f in ctx.functions]
        gradients = iter(ctx.state.with_same_draws(_record_cond, pred, backwards, [*tensors, *grads], ()))
        return None, None, None, None, *(next(gradients) if x.requires_grad else None for x in tensors)


def _record_cond(
    pred: Tensor, functions: Sequence[Callable[..., Any]], operands: Sequence[Tensor], lifted: Sequence[Tensor]
) -> Any:
    regions, outside = zip(*(capture(f, operands, lifted) for f in functions), strict=True)
    a, b = (region.outputs for region in regions)
    if a != b:
        raise TraceError(
            f"{here()}: the branches of torch.cond return {_format(a)} and {_format(b)}. Return the same shapes and "
            "dtypes from both."
        )
    return run(Flow("cond", regions, len(operands), 0, False, a), [pred, *operands], outside)


def _format(outputs: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return "(" + ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in outputs) + ")"


# -- torch.while_loop --


def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried: Sequence[Any],
    additional: Sequence[Any] = (),
    **_: Any,
) -> Any:
    """`torch.while_loop` in a step."""
    tensors = [x if isinstance(x, Tensor) else torch.tensor(x) for x in carried]
    rest = [x if isinstance(x, Tensor) else torch.tensor(x) for x in additional]
    lifted = _with_lifted((lambda *c: cond_fn(*c, *rest), lambda *c: body_fn(*c, *rest)), tensors)[len(tensors) :]
    return tuple(
        _While.apply(lambda *c: cond_fn(*c, *rest), lambda *c: body_fn(*c, *rest), len(tensors), *tensors, *lifted)
    )


class _While(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cond_fn, body_fn, count, *tensors):
        ctx.source = here()
        carried, lifted = tensors[:count], tensors[count:]
        regions, outside = zip(*(capture(f, carried, lifted) for f in (cond_fn, body_fn)), strict=True)
        kinds = [(tuple(x.shape), x.dtype) for x in carried]
        if regions[1].outputs != kinds:
            raise TraceError(
                f"{here()}: the body of torch.while_loop returns {_format(regions[1].outputs)} for {_format(kinds)}. "
                "Return the carried tensors with the same shapes and dtypes."
            )
        return tuple(run(Flow("while", regions, count, 0, False, kinds), carried, outside))

    @staticmethod
    def backward(ctx, *grads):
        raise TraceError(
            f"{ctx.source}: torch.while_loop cannot be differentiated, since its number of iterations is not known. "
            "Use scan with a fixed number of iterations, and torch.where to skip some of them; or detach."
        )


# -- scan --


def scan(
    combine_fn: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], additional_inputs: Sequence[Any] = ()
) -> Any:
    """`scan` in a step, with init and xs as lists of tensors; the result has the structure of the body's result."""
    n, m = len(init), len(xs)
    structure: Any = None

    def body(*args: Tensor) -> list[Tensor]:
        nonlocal structure
        leaves, spec = pytree.tree_flatten(combine_fn(*args, *additional_inputs))
        structure = spec, [isinstance(x, Tensor) for x in leaves]
        return [x for x in leaves if isinstance(x, Tensor)]

    like = [*init, *(x[0] for x in xs)]
    lifted = _with_lifted((body,), like)[n + m :]
    out = iter(_Scan.apply(body, n, m, *init, *xs, *lifted))
    spec, is_tensor = structure
    return pytree.tree_unflatten([next(out) if tensor else None for tensor in is_tensor], spec)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, body, n, m, *tensors):
        init, xs, lifted = tensors[:n], tensors[n : n + m], tensors[n + m :]
        ctx.body, ctx.n, ctx.m, ctx.state = body, n, m, _GeneratorState()
        with_carries = any(x.requires_grad for x in tensors)

        def step(*args: Tensor) -> list[Tensor]:
            out = body(*args)
            return [*out, *(c.clone() for c in args[:n])] if with_carries else out

        out = _record_scan(step, init, xs, lifted, reverse=False)
        count = len(out) - (n if with_carries else 0)
        ctx.save_for_backward(*out[count:], *xs, *lifted)
        ctx.grads = [x.requires_grad for x in tensors]
        return tuple(out[:count])

    @staticmethod
    def backward(ctx, *grads):
        n, m = ctx.n, ctx.m
        saved = ctx.saved_tensors
        carries, xs, lifted = saved[:n], saved[n : n + m], saved[n + m :]
        requires_grad = ctx.grads
        # All carried tensors that can have a gradient require one.
        operands = [c[0].detach().requires_grad_(c.is_floating_point() or c.is_complex()) for c in carries]
        operands += [x[0].detach().requires_grad_(w) for x, w in zip(xs, requires_grad[n : n + m], strict=True)]
        backward = differentiated(ctx.body, operands, lifted, len(grads))
        differentiable = [i for i, c in enumerate(carries) if c.is_floating_point() or c.is_complex()]
        with_grad = [x for x in lifted if x.requires_grad]
        carry_grads, output_grads = grads[:n], grads[n:]

        def step(*args: Tensor) -> list[Tensor]:
            g_carry, sums, rest = args[:n], args[n : n + len(with_grad)], args[n + len(with_grad) :]
            gradients = backward(*rest[: n + m], *lifted, *g_carry, *rest[n + m :])
            new = dict(zip(differentiable, gradients, strict=False))
            g_carry = tuple(new.get(i, g).to(g.dtype) for i, g in enumerate(g_carry))
            g_xs = gradients[len(differentiable) : len(gradients) - len(with_grad)]
            return [
                *g_carry,
                *(a + b for a, b in zip(sums, gradients[len(gradients) - len(with_grad) :], strict=True)),
                *g_xs,
            ]

        start = [*carry_grads, *(torch.zeros_like(x) for x in with_grad)]
        out = ctx.state.with_same_draws(_record_scan, step, start, [*carries, *xs, *output_grads], lifted, True)
        xs_gradients, sums = iter(out[n + len(with_grad) :]), iter(out[n : n + len(with_grad)])
        return (
            None,
            None,
            None,
            *(g if w else None for g, w in zip(out[:n], requires_grad[:n], strict=True)),
            *(next(xs_gradients) if w else None for w in requires_grad[n : n + m]),
            *(next(sums) if x.requires_grad else None for x in lifted),
        )


def _record_scan(
    body: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], lifted: Sequence[Tensor], reverse: bool
) -> Any:
    like = [*init, *(x.detach()[0] for x in xs)]
    region, outside = capture(body, like, lifted)
    kinds = [(tuple(x.shape), x.dtype) for x in init]
    if region.outputs[: len(init)] != kinds:
        raise TraceError(
            f"{here()}: the body of scan returns {_format(region.outputs[: len(init)])} for the carried tensors "
            f"{_format(kinds)}. Return them with the same shapes and dtypes."
        )
    length = xs[0].shape[0]
    outputs = kinds + [((length, *shape), dtype) for shape, dtype in region.outputs[len(init) :]]
    return run(Flow("scan", (region,), len(init), len(xs), reverse, outputs), [*init, *xs], [outside])


# -- patches of torch --


def _in_a_step(replacement: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) if session.trace is None else replacement(*args[1:], **kwargs)


for _name, _ours in (("cond.CondOp", cond), ("while_loop.WhileLoopOp", while_loop), ("scan.ScanOp", scan)):
    replaces(f"torch._higher_order_ops.{_name}.__call__")(partial(_in_a_step, _ours))


@replaces("torch._higher_order_ops.utils._hop_compile_and_call")
def call(original: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
    """Call the function directly: eager PyTorch compiles it with Dynamo first."""
    return original(function, args, kwargs) if session.trace is None else function(*args, **(kwargs or {}))
