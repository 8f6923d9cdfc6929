"""Capture of a constructor: `deferred_init`, and `deferred` for a block of code."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from .. import timeline
from ..compat.patches import install_imported
from ..compat.torch_names import buffers_of, parameters_of
from ..errors import CaptureError, NothingDeferredError
from ..interpreter import interruptible_inside, paused
from ..program.source import here, is_machinery, raised_at
from . import checkpoint_loaders as _checkpoint_loaders  # noqa: F401 - for its patches
from . import direct_memory_access, session
from . import dtensor as _dtensor  # noqa: F401 - likewise
from . import patches as _patches  # noqa: F401 - likewise
from . import trunc_normal as _trunc_normal  # noqa: F401 - likewise
from . import zero3 as _zero3  # noqa: F401 - likewise
from .distributed import parts_of
from .evaluation import state_of
from .generators import POLICIES
from .recorder import CaptureMode, DeferredTensor
from .tensor import disable_first_use, enable_first_use

T = TypeVar("T")


def deferred(rng: str | None = None, *, preserve_rng_state: bool = False) -> AbstractContextManager[None]:
    """Record the tensor operations in a block without computing them.

    Like `with torch.device("meta")`, but the tensors record how they are computed: they report the requested device,
    and `materialize_module` computes them, bit-identical to running the block eagerly. When the block ends, PyTorch's
    generators have the same state as after eager execution.

    Examples:
        >>> with fl.deferred():
        ...     model = nn.Linear(512, 512)  # takes no memory, and no time
        >>> fl.is_deferred(model)
        True
        >>> model = fl.materialize_module(model, device="cpu")

    Args:
        rng: the policy of random numbers. "eager" (the default): the numbers of eager PyTorch. "counter": normals and
            uniforms are a function of the seed, the number of the random operation in the block, and the element's
            index, so that any slice of a weight can be made at a cost proportional to its length, on any mesh and by
            any engine; they differ from eager PyTorch's (see docs/random-policies.md). A nested block inherits the
            policy of the outer one.
        preserve_rng_state: when the block ends, restore PyTorch's generators as if it had drawn nothing, as after a
            constructor on the meta device (seeds set in the block remain). For scripts that seed, construct on meta,
            and initialize afterwards. By default generators are left as by eager construction.

    Returns:
        A context manager; entering it gives None.

    Raises:
        CaptureError: if the policy does not exist or differs from that of an enclosing block; if the block preserves
            the generators inside one that does not; or if the default device is meta.
    """
    if torch.get_default_device().type == "meta":
        raise CaptureError(
            f"{here()}: the default device is meta, where tensors are never initialized, so there would be nothing to "
            "defer. Remove torch.device('meta') around the constructor, or torch.set_default_device('meta'): a "
            "deferred constructor computes nothing either, and records how the weights are initialized."
        )
    policy = _policy(rng)
    if preserve_rng_state and session.depth and not session.generators.preserve:
        raise CaptureError(
            f"{here()}: preserve_rng_state=True inside a block without it: the outer block would go on drawing the "
            "numbers that this one has drawn. Pass it to the outer block, or put this block after it."
        )
    return _deferred(policy, preserve_rng_state)


@interruptible_inside
def _deferred(policy: str, preserve: bool = False) -> Iterator[None]:
    session.enter(policy, preserve)
    disable_first_use()
    try:
        with session.KeepsGradMode(), timeline.span("capture"), paused(), _synchronous_loading(), CaptureMode():
            yield
    except (AssertionError, RuntimeError) as error:
        _explain_no_cuda(error)
        _explain_memory(error)
        raise
    finally:
        session.leave()
        install_imported()
        if not session.depth and session.trace is None:
            enable_first_use()


_SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"


@contextmanager
def _synchronous_loading() -> Iterator[None]:
    """Let transformers load weights in the capturing thread: operations of other threads are not recorded."""
    if _SYNCHRONOUS in os.environ:
        yield
        return
    os.environ[_SYNCHRONOUS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_SYNCHRONOUS, None)


def _explain_no_cuda(error: Exception) -> None:
    """Replace torch's error for a constructor that requests a GPU on a machine without one."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not frames[-1].filename.endswith(os.path.join("torch", "cuda", "__init__.py")):
        return
    line = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if not is_machinery(f.filename)), str(here()))
    reason = str(error).splitlines()[0].rstrip(".")
    raise CaptureError(
        f"{line}: the constructor requests a CUDA device, and this machine has none ({reason}). The random numbers of "
        "a GPU depend on the GPU, so they can only be captured where there is one. Construct on the CPU, and move the "
        "weights: firstloss.materialize_module(module, device='cuda')."
    ) from error


def _explain_memory(error: Exception) -> None:
    """Replace torch's error for a C function that accesses the memory of a deferred tensor."""
    if isinstance(error, CaptureError) or not direct_memory_access.is_unallocated(error):
        return
    raise CaptureError(
        f"{raised_at(error)}: this line calls a function that accesses the memory of a tensor without PyTorch's "
        "dispatcher, and a deferred tensor has no memory. Construct that part outside of the deferred block, or pass a "
        "copy that has memory: torch.tensor(x.tolist())."
    ) from error


def _policy(rng: str | None) -> str:
    if rng is not None and rng not in POLICIES:
        raise CaptureError(f"{here()}: rng={rng!r} is not a policy. Use rng='eager' or rng='counter'.")
    if not session.depth:
        return rng or "eager"
    outer = session.generators.policy
    if rng not in (None, outer):
        raise CaptureError(
            f"{here()}: rng={rng!r} inside a block with rng={outer!r}: both would draw from the same generators. Omit "
            "rng here, or end the outer block first."
        )
    return outer


def deferred_init(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `fn(*args, **kwargs)` without computing.

    All arguments are passed to `fn`. For another random policy use `with fl.deferred(rng="counter"):`.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> model = fl.deferred_init(nn.Linear, 8, out_features=4)
        >>> _ = torch.manual_seed(0)
        >>> torch.equal(fl.materialize_module(model).weight, nn.Linear(8, 4).weight)
        True

    Args:
        fn: a constructor: any callable that creates tensors, such as a Module class.
        *args, **kwargs: its arguments.

    Returns:
        The result of `fn`, which contains deferred tensors.

    Raises:
        NothingDeferredError: if the result contains no tensor, or if `fn` is a module instance.
    """
    if not callable(fn):
        raise NothingDeferredError(
            f"{here()}: deferred_init takes a constructor, and a {type(fn).__name__} is not callable. Use "
            "deferred_init(Model, ...) or deferred_init(lambda: Model(...))."
        )
    if isinstance(fn, torch.nn.Module) and not args and not kwargs:
        name = type(fn).__name__
        raise NothingDeferredError(
            f"{here()}: deferred_init was given a {name} instance, which has already been constructed eagerly. Pass "
            f"the constructor and its arguments: deferred_init({name}, ...)."
        )
    capturing = deferred()
    with capturing, capturing:
        result = fn(*args, **kwargs)
        _redeem_tickets(result)
    if not any(True for _ in tensors_in(result)):
        name = getattr(fn, "__qualname__", repr(fn))
        raise NothingDeferredError(
            f"{here()}: {name} returned {_describe(result)}, which contains no tensor, so there is nothing to "
            "initialize. Pass a callable that returns an nn.Module or a tensor. For an object that keeps modules in "
            "its attributes write: with firstloss.deferred(): ..."
        )
    return result


def _redeem_tickets(result: Any) -> None:
    """Replace tickets in generators and states that the result holds, since they are invalid after the capture."""
    for module in result.modules() if isinstance(result, torch.nn.Module) else ():
        for attribute in (*buffers_of(module).values(), *vars(module).values()):
            kind = type(attribute)
            if kind is torch.Tensor:
                session.generators.redeem(attribute)
            elif issubclass(kind, torch.Generator):
                session.generators.load(attribute)
    if not isinstance(result, torch.nn.Module):
        for tensor in tensors_in(result):
            session.generators.redeem(tensor)


def _describe(result: Any) -> str:
    return "None" if result is None else f"an object of type {type(result).__name__}"


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module, a tensor, or nested lists, tuples and dicts of them."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, torch.nn.Module):
        for _, tensor, _ in named_tensors(result):
            yield tensor
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from tensors_in(item)
    elif isinstance(result, dict):
        for item in result.values():
            yield from tensors_in(item)


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    """(qualified name, tensor, kind) of all parameters, buffers and plain tensor attributes, ties included.

    `kind` is "parameter", "buffer" or "attribute".
    """
    for prefix, sub in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, parameter in parameters_of(sub).items():
            if parameter is not None:
                yield dot + name, parameter, "parameter"
        for name, buffer in buffers_of(sub).items():
            if buffer is not None:
                yield dot + name, buffer, "buffer"
        for name, attribute in vars(sub).items():
            if isinstance(attribute, torch.Tensor):
                yield dot + name, attribute, "attribute"
            elif type(attribute) in _CONTAINERS and name not in _MODULE_TABLES:
                for path, tensor in _contained(attribute, dot + name):
                    yield path, tensor, "attribute"


_CONTAINERS = (list, tuple, dict)
_MODULE_TABLES = frozenset(vars(torch.nn.Module()))


def _contained(container: Any, path: str, depth: int = 8) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a container that is an attribute of a module."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, item in items:
        if isinstance(item, torch.Tensor):
            yield f"{path}.{key}", item
        elif type(item) in _CONTAINERS and depth:
            yield from _contained(item, f"{path}.{key}", depth - 1)


def is_deferred(module_or_tensor: torch.nn.Module | torch.Tensor) -> bool:
    """Whether a tensor, or any parameter or buffer of a module, is still deferred.

    Examples:
        >>> model = fl.deferred_init(nn.Linear, 8, 4)
        >>> fl.is_deferred(model), fl.is_deferred(model.bias)
        (True, True)
        >>> fl.is_deferred(fl.materialize_module(model))
        False

    Args:
        module_or_tensor: a Module or a tensor.

    Returns:
        False if everything has been materialized.
    """
    tensors = (part for tensor in tensors_in(module_or_tensor) for part in parts_of(tensor))
    return any(type(t) is DeferredTensor and state_of(t._storage).pending for t in tensors)
