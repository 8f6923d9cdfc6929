"""Capture of a constructor: `deferred_init`, and `deferred` for a block of code."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from .. import timeline
from ..compat.torch_names import buffers_of, parameters_of
from ..errors import CaptureError, NothingDeferredError
from ..gc_pause import paused
from ..program.source import here, is_machinery, raised_at
from . import activation_checkpointing as _rematerialize  # noqa: F401 - likewise
from . import checkpoint_loaders, direct_memory_access, first_use, patches, session
from . import control_flow as _regions  # noqa: F401 - for its patches
from . import running_averages as _running_averages  # noqa: F401 - likewise
from . import trunc_normal as _truncated  # noqa: F401 - likewise
from . import untyped_storage as _storages  # noqa: F401 - likewise
from .distributed import parts_of
from .generators import POLICIES
from .recorder import CaptureMode, DeferredTensor
from .tensor_states import state_of

T = TypeVar("T")


def deferred(rng: str | None = None, *, preserve_rng_state: bool = False) -> AbstractContextManager[None]:
    """Record what the block does to tensors; compute nothing.

    As `with torch.device("meta")`, but the tensors remember how they are made: their device is the one that the
    code asked for, and `materialize_module` makes them, bit for bit what the block would have made without us.
    When the block ends, PyTorch's generators stand where they would have stood.

    Examples:
        >>> with fl.deferred():
        ...     model = nn.Linear(512, 512)  # takes no memory, and no time
        >>> fl.is_deferred(model)
        True
        >>> model = fl.materialize_module(model, device="cpu")

    Args:
        rng: where random numbers come from. "eager" (the default): the stream that eager PyTorch draws from.
            "counter": normals and uniforms depend on the seed, on which of the block's random operations draws them,
            and on their place in the tensor, and on nothing else, so that any slice of any weight costs what its
            length costs, on any mesh and any engine; they are not eager PyTorch's (see docs/random-policies.md). A
            block inside another has that one's policy.
        preserve_rng_state: when the block ends, let PyTorch's generators stand where they would if it had drawn
            nothing, as they do after a constructor on the meta device (what it seeds stays seeded). For scripts
            that seed, construct on meta, and initialise afterwards: so they draw what they always did. The default
            leaves generators where eager construction would.

    Returns:
        A context manager; entering it gives None.

    Raises:
        CaptureError: if there is no such policy, if the block is inside one of another, or one that preserves the
            generators is inside one that does not; or if the default device is meta.
    """
    if torch.get_default_device().type == "meta":
        raise CaptureError(
            f"{here()}: the default device is meta, on which nothing is ever initialised, so there would be nothing to "
            "defer. Leave out torch.device('meta') around the constructor, and torch.set_default_device('meta'): a "
            "deferred constructor computes nothing either, and remembers what the weights shall hold."
        )
    policy = _policy(rng)
    if preserve_rng_state and session.depth and not session.generators.preserve:
        raise CaptureError(
            f"{here()}: preserve_rng_state=True inside a block without it: the outer block goes on drawing where this "
            "one would stop. Say it of the outer block, or put this one after it."
        )
    return _deferred(policy, preserve_rng_state)


@contextmanager
def _deferred(policy: str, preserve: bool = False) -> Iterator[None]:
    session.enter(policy, preserve)
    first_use.disable_first_use()
    try:
        with timeline.span("capture"), paused(), checkpoint_loaders.in_this_thread(), CaptureMode():
            yield
    except (AssertionError, RuntimeError) as error:
        _explain_no_cuda(error)
        _explain_memory(error)
        raise
    finally:
        session.leave()
        patches.teach_dynamo()
        checkpoint_loaders.teach()
        if not session.depth and session.trace is None:
            first_use.enable_first_use()


def _explain_no_cuda(error: Exception) -> None:
    """An error of ours in place of torch's, where a constructor asks for a GPU that this machine does not have."""
    found = traceback.extract_tb(error.__traceback__)
    if not found or not found[-1].filename.endswith(os.path.join("torch", "cuda", "__init__.py")):
        return
    where = next((f"{f.filename}:{f.lineno}" for f in reversed(found) if not is_machinery(f.filename)), str(here()))
    reason = str(error).splitlines()[0].rstrip(".")
    raise CaptureError(
        f"{where}: the constructor asks for a CUDA device, and there is none here ({reason}). What a GPU would draw "
        "depends on the GPU, so it is captured where there is one. Construct for the CPU, and move the weights where "
        "they are needed: firstloss.materialize_module(module, device='cuda')."
    ) from error


def _explain_memory(error: Exception) -> None:
    """An error of ours in place of torch's, where a function in C wants the memory of a deferred tensor."""
    if isinstance(error, CaptureError) or not direct_memory_access.is_unallocated(error):
        return
    raise CaptureError(
        f"{raised_at(error)}: this line calls a function that reads or writes the memory of a tensor without telling "
        "PyTorch's dispatcher, and a deferred tensor has none. Construct that part outside of the deferred block, or "
        "give the function a copy with memory of its own: torch.tensor(x.tolist())."
    ) from error


def _policy(rng: str | None) -> str:
    if rng is not None and rng not in POLICIES:
        raise CaptureError(f"{here()}: rng={rng!r} is not a policy. Write rng='eager' or rng='counter'.")
    if not session.depth:
        return rng or "eager"
    outer = session.generators.policy
    if rng not in (None, outer):
        raise CaptureError(
            f"{here()}: rng={rng!r} inside a block with rng={outer!r}: both would draw from the same generators. Leave "
            "rng out here, or end the outer block first."
        )
    return outer


def deferred_init(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `fn(*args, **kwargs)` without computing.

    All arguments are `fn`'s. For another policy of random numbers write `with fl.deferred(rng="counter"):`.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> model = fl.deferred_init(nn.Linear, 8, out_features=4)
        >>> _ = torch.manual_seed(0)
        >>> torch.equal(fl.materialize_module(model).weight, nn.Linear(8, 4).weight)
        True

    Args:
        fn: a constructor: any callable that makes tensors, such as a Module's class.
        *args, **kwargs: its arguments.

    Returns:
        What `fn` returns, with deferred tensors in it.

    Raises:
        NothingDeferredError: if what `fn` returns holds no tensor, or `fn` is a module that has been constructed.
    """
    if not callable(fn):
        raise NothingDeferredError(
            f"{here()}: deferred_init takes a constructor to call, and {type(fn).__name__} cannot be called. Write "
            "deferred_init(Model, ...) or deferred_init(lambda: Model(...))."
        )
    if isinstance(fn, torch.nn.Module) and not args and not kwargs:
        name = type(fn).__name__
        raise NothingDeferredError(
            f"{here()}: deferred_init is given a {name} that is constructed already, eagerly. Give it the constructor "
            f"and its arguments: deferred_init({name}, ...)."
        )
    with deferred():
        result = fn(*args, **kwargs)
        _redeem_tickets(result)
    if not any(True for _ in tensors_in(result)):
        name = getattr(fn, "__qualname__", repr(fn))
        raise NothingDeferredError(
            f"{here()}: {name} returned {_describe(result)}, which holds no tensor, so there is nothing to "
            "initialise. Pass a callable that returns an nn.Module or a tensor."
        )
    return result


def _redeem_tickets(result: Any) -> None:
    """Generators and their states that the constructor kept: nobody will know tickets when the capture has ended."""
    for module in result.modules() if isinstance(result, torch.nn.Module) else ():
        for attribute in (*buffers_of(module).values(), *vars(module).values()):
            if isinstance(attribute, torch.Generator):
                session.generators.load(attribute)
            elif type(attribute) is torch.Tensor:
                session.generators.redeem(attribute)
    if not isinstance(result, torch.nn.Module):
        for tensor in tensors_in(result):
            session.generators.redeem(tensor)


def _describe(result: Any) -> str:
    return "None" if result is None else f"an object of type {type(result).__name__}"


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module, a tensor, or lists, tuples and dicts of them."""
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
    """The tensors in a container that a module keeps as an attribute."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, item in items:
        if isinstance(item, torch.Tensor):
            yield f"{path}.{key}", item
        elif type(item) in _CONTAINERS and depth:
            yield from _contained(item, f"{path}.{key}", depth - 1)


def is_deferred(what: torch.nn.Module | torch.Tensor) -> bool:
    """Whether a tensor, or any parameter or buffer of a module, is still a recipe.

    Examples:
        >>> model = fl.deferred_init(nn.Linear, 8, 4)
        >>> fl.is_deferred(model), fl.is_deferred(model.bias)
        (True, True)
        >>> fl.is_deferred(fl.materialize_module(model))
        False

    Args:
        what: a Module or a tensor.

    Returns:
        False once all has been materialized.
    """
    tensors = (part for tensor in tensors_in(what) for part in parts_of(tensor))
    return any(type(t) is DeferredTensor and state_of(t._storage).pending for t in tensors)
