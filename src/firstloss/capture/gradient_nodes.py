"""The autograd nodes that accumulate the gradients of weights, where a weight becomes another tensor of C++.

Such a node, an `AccumulateGrad`, belongs to the tensor of C++ behind the weight, which is exchanged where a weight
moves to the backend, or is materialized. So graphs that end in the node continue to the weight's next node. And the
hooks of a node that Python holds, by which FSDP and optimizers work in the backward pass, are called by the next node
as well.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from ..compat.torch_names import HOOK_TABLES, DisableTorchDispatch, InferenceMode, is_parameter, use_count
from .autograd_boundary import with_autograd
from .tensor import is_leaf

_Gradients = tuple[torch.Tensor | None, ...]

_FOLLOWED, _SUCCESSOR = "firstloss.followed", "firstloss.successor"  # in a node's metadata: a `_Followed`, `_Successor`


class _Successor:
    """In the metadata of a node that Python holds: the weight's node, which must live as long."""

    node: Any = None


class _Followed:
    """The hooks of earlier nodes of a weight, which its present node calls."""

    def __init__(self, tables: _Tables, successors: list[weakref.ref[_Successor]]) -> None:
        self._tables = tables
        self._successors = successors

    def hooks(self) -> Iterator[Any]:
        """All, with those that a hook calls."""
        for table in self._tables:
            for hook in table.values():
                followed = getattr(hook, "__self__", None)
                if type(followed) is _Followed:
                    yield from followed.hooks()
                yield hook

    def successors(self) -> list[_Successor]:
        """Those whose nodes Python holds."""
        return [successor for ref in self._successors if (successor := ref()) is not None]

    def follow_with(self, node: Any) -> None:
        """Let `node` be the weight's present node."""
        node.metadata[_FOLLOWED] = self
        node.register_prehook(self._before)
        node.register_hook(self._after)
        for successor in self.successors():
            successor.node = node

    def _before(self, gradients: _Gradients) -> _Gradients:
        for hook in list(self._tables.before.values()):
            changed = hook(gradients) if getattr(hook, "func", None) is not _redirect else None
            if changed is not None:
                gradients = changed if isinstance(changed, tuple) else (changed,)
        return gradients

    def _after(self, of_inputs: _Gradients, gradients: _Gradients) -> None:
        for hook in list(self._tables.after.values()):
            hook(of_inputs, gradients)


class _Tables(NamedTuple):
    """The hooks of a node, to which others are added."""

    before: dict[int, Callable[..., Any]]
    after: dict[int, Callable[..., Any]]


class HeldNodes:
    """The hooks of those nodes of weights that Python holds, as a guard of a step sees them."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._followed: list[_Followed] = []

    def hooks(self, weights: Sequence[torch.Tensor]) -> list[Any]:
        """All that are registered now.

        Args:
            weights: the same at each call.
        """
        counts = [use_count(weight)() for weight in weights]
        if counts != self._counts:
            self._counts = counts
            found = map(_followed_after, filter(_may_have_node, weights))
            self._followed = [followed for followed in found if followed is not None]
        return [hook for followed in self._followed for hook in followed.hooks()]


@contextlib.contextmanager
def exchanged(weight: torch.Tensor, other: torch.Tensor) -> Iterator[None]:
    """A block in which the tensors of C++ behind the Python objects `weight` and `other` are exchanged."""
    followed, node = (_followed_after(weight), _node_of(weight)) if _may_have_node(weight) else (None, None)
    yield
    if node is None:
        return
    node.register_prehook(functools.partial(_redirect, weight))
    setattr(other, HOOK_TABLES[1], {})  # gradients that arrive there are redirected to `weight`, whose hooks run
    if followed is not None:
        followed.follow_with(_node_of(weight))


def _redirect(weight: torch.Tensor, gradients: _Gradients) -> tuple[None]:
    """What an earlier node of `weight` does with a gradient, instead of accumulating it."""
    if gradients[0] is not None:
        get_gradient_edge(weight).node(gradients[0])  # type: ignore[operator]
    return (None,)


def _may_have_node(weight: torch.Tensor) -> bool:
    """Nearly always nothing else holds the tensor of C++, and there is no node."""
    return use_count(weight)() > 1 and is_leaf(weight) and (weight.requires_grad or is_parameter(weight))


def _node_of(weight: torch.Tensor) -> Any:
    """The node that accumulates its gradient, which is created if there is none; None if there can be none."""
    frozen = not weight.requires_grad
    if frozen and not (weight.is_floating_point() or weight.is_complex()):
        return None
    with with_autograd(), InferenceMode(False), DisableTorchDispatch():
        if frozen:
            torch.Tensor.requires_grad_(weight, True)
        try:
            return get_gradient_edge(weight).node
        except AssertionError:  # a view of a weight that did not require a gradient then: no graph ends there
            return None
        finally:
            if frozen:
                torch.Tensor.requires_grad_(weight, False)  # not ours, which materializes views


def _followed_after(weight: torch.Tensor) -> _Followed | None:
    """The hooks that the node of what `weight` becomes will call, if there are some."""
    tables, is_alone, count = _look_at(weight)
    if tables is None:
        return None
    node = _node_of(weight)
    followed: _Followed | None = node.metadata.get(_FOLLOWED)
    successors = [] if followed is None else followed.successors()
    if count == _references(is_alone) + len(successors):  # which hold it
        return followed if successors else None
    successor = node.metadata.setdefault(_SUCCESSOR, _Successor())
    return _Followed(tables, [weakref.ref(holder) for holder in (*successors, successor)])


def _look_at(weight: torch.Tensor) -> tuple[_Tables | None, bool, int]:
    """The hooks of its node; whether PyTorch holds the node for Python alone; and its Python reference count."""
    node = _node_of(weight)
    if node is None:
        return None, True, 0
    handles = node.register_prehook(_nothing), node.register_hook(_nothing)
    tables = _Tables(*(handle.hooks_dict_ref() for handle in handles))
    is_alone = bool(gc.get_referents(node))  # PyTorch shows the tables then only
    for handle in handles:
        handle.remove()
    return tables, is_alone, sys.getrefcount(node)


@functools.cache
def _references(is_alone: bool) -> int:
    """The reference count of a node that no code in Python holds, as `_look_at` sees it; PyTorch may hold one itself
    where the node is in a graph."""
    with DisableTorchDispatch(), torch.enable_grad():
        weight = torch.ones(1, requires_grad=True)
        graph = None if is_alone else weight * 2
        count = _look_at(weight)[-1]
        del graph
    return count


def _nothing(*_: object) -> None:
    pass
