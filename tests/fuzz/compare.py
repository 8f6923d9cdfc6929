"""Compare the state of two runs of a program: values, structure, object identity, shared memory."""

from __future__ import annotations

import array
import collections
import contextvars
import enum
import functools
import itertools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from firstloss.runtime.backend import Backend
from firstloss.runtime.compiled_model import CompiledModel
from firstloss.runtime.step.trace import TracedStep

# Compilers sum in another order than PyTorch's kernels. In float64, the effect in a few steps of a tiny model is far
# below that of any fault; in float32, some optimizers divide by small numbers.
_RELATIVE = {torch.float64: 1e-6, torch.float32: 1e-3}
_ABSOLUTE = {torch.float64: 1e-8, torch.float32: 1e-5}
_HALF = 3e-2  # and for half precision

_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size, range, types.EllipsisType)
_OPAQUE = (
    Backend,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    torch.Generator,
    torch.utils.hooks.RemovableHandle,
    staticmethod,
    classmethod,
    property,
    torch.autograd.graph.Node,
)
_ITEMS_OF_AN_ITERATOR = 20
_OTHER_VALUES = "eager "  # how the message begins if tensors differ only in values


class Difference(Exception):
    """A difference between the two runs.

    Attributes:
        of_values: whether it is numbers alone: the structure is the same as far as it was seen.
    """

    def __init__(self, path: str, what: str, of_values: bool = False) -> None:
        super().__init__(f"{path}: {what}")
        self.path = path
        self.of_values = of_values


def compare(eager: Any, traced: Any, module: str, tolerance: float = 1) -> None:
    """Compare the variables of both runs, then the contents of all tensors and arrays after editing each in place.

    Args:
        module: the name of the program's module: of functions and classes of other modules only the names are compared.
        tolerance: a factor of what is tolerated.

    Raises:
        Difference: at the first one, the shortest way from the variables first.
    """
    walk = _Walk(module, tolerance)
    walk.run(eager, traced)
    _edit_each(walk.tensors, walk.arrays)


def _edit_each(tensors: list[tuple[str, torch.Tensor, torch.Tensor]], arrays: list[tuple[str, Any, Any]]) -> None:
    """Edit all in place, in the same order: tensors that share memory see each other's edits."""
    seen = [(path, pair, [_content(one) for one in pair]) for path, *pair in (*tensors, *arrays)]
    for i, (_, *pair) in enumerate(tensors):
        if _editable(pair[0]):
            for tensor in pair:
                tensor.detach().add_(1 + i % 7)
    for _, *twins in arrays:
        if twins[0].dtype.kind == "f" and twins[0].flags.writeable:
            if not twins[1].flags.writeable:
                continue  # a copy of device memory that cannot be edited is not a silent difference
            for twin in twins:
                twin += 3
    for path, pair, before in seen:
        a, b = ((_content(one) - was) for one, was in zip(pair, before, strict=True))
        # The edits add integers; next to a large number they are partly rounded away.
        if not bool((a.sub(b).abs() <= 0.25 + 0.01 * before[0].abs()).logical_or(a.isnan()).all()):
            raise Difference(
                path, f"after each tensor has been edited in place, eager +{_shown(a)}, traced +{_shown(b)}"
            )


def _precision(held: Any) -> float:
    if isinstance(held, torch.Tensor):
        return torch.finfo(held.dtype).eps if held.is_floating_point() or held.is_complex() else 0
    return float(np.finfo(held.dtype).eps) if held.dtype.kind in "fc" else 0


def _content(held: Any) -> torch.Tensor:
    """A copy of the content of a tensor or array, by which later edits can be recognized."""
    with torch.no_grad():
        if isinstance(held, torch.Tensor):
            content = torch.as_tensor(held.detach().clone())
            content = content.to_dense() if content.is_sparse else content
        else:
            content = torch.from_numpy(np.array(held, dtype=np.complex128 if held.dtype.kind == "c" else np.float64))
        return torch.view_as_real(content).double() if content.is_complex() else content.double()


def _editable(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.bool or tensor.is_sparse or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return False
    expanded = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not expanded


def _tensors_differ(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> str:
    if isinstance(a, nn.Parameter) != isinstance(b, nn.Parameter):
        return f"a {type(a).__name__} in eager PyTorch, traced a {type(b).__name__}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} in eager PyTorch, traced {tuple(b.shape)} {b.dtype}"
    if isinstance(a, nn.Parameter) and a.requires_grad != b.requires_grad:
        return f"requires_grad: eager {a.requires_grad}, traced {b.requires_grad}"
    with torch.no_grad():
        x, y = a.detach().clone(), b.detach().clone()
        y = torch.as_tensor(y)
        if not _close(x, y, tolerance):
            return f"{_OTHER_VALUES}{_shown(x)}, traced {_shown(y)}"
    return ""


def _shown(tensor: torch.Tensor) -> str:
    values = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in tensor.flatten()[:3].tolist())
    return f"[{values}{', ...' if tensor.numel() > 3 else ''}]"


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if not a.dtype.is_floating_point and not a.dtype.is_complex:
        return torch.equal(a, b)
    real = a.real.dtype if a.dtype.is_complex else a.dtype
    relative, absolute = _RELATIVE.get(real, _HALF), _ABSOLUTE.get(real, _HALF)
    return torch.allclose(a, b, rtol=relative * tolerance, atol=absolute * tolerance, equal_nan=True)


class _Walk:
    """A breadth-first traversal of both object graphs."""

    def __init__(self, module: str, tolerance: float) -> None:
        self._module = module
        self._tolerance = tolerance
        self._todo: collections.deque[tuple[str, Any, Any]] = collections.deque()
        self._twin: tuple[dict[int, tuple[int, str]], dict[int, tuple[int, str]]] = ({}, {})
        self._alive: list[Any] = []  # so that no id is reused
        self.tensors: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.arrays: list[tuple[str, Any, Any]] = []

    def run(self, eager: Any, traced: Any) -> None:
        self._todo.append(("", eager, traced))
        while self._todo:
            self._visit(*self._todo.popleft())

    def _visit(self, path: str, a: Any, b: Any) -> None:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if self._again(path, a, b):
                return
            if difference := _tensors_differ(a, b, self._tolerance):
                raise Difference(path, difference, of_values=difference.startswith(_OTHER_VALUES))
            self.tensors.append((path, a, b))
            if a.is_leaf and b.is_leaf:
                self._todo.append((path + ".grad", a.grad, b.grad))
            return
        if type(a).__qualname__ != type(b).__qualname__:
            raise Difference(path, f"eager {_brief(a)}, traced {_brief(b)}")
        if isinstance(a, enum.Enum):
            self._todo.append((path + ".name", a.name, b.name))
            self._todo.append((path + ".value", a.value, b.value))
        elif isinstance(a, slice):  # of objects, perhaps
            self._todo += [(f"{path}.{end}", getattr(a, end), getattr(b, end)) for end in ("start", "stop", "step")]
        elif isinstance(a, _PLAIN) and type(a) in _PLAIN:
            if a != b:
                raise Difference(path, f"eager {_brief(a)}, traced {_brief(b)}")
        elif isinstance(a, (float, complex, np.generic)):
            relative, absolute = _RELATIVE[torch.float64] * self._tolerance, _ABSOLUTE[torch.float32] * self._tolerance
            if not np.allclose(a, b, rtol=relative, atol=absolute, equal_nan=True):
                raise Difference(path, f"eager {a}, traced {b}", of_values=True)
        elif isinstance(a, _OPAQUE) or isinstance(a, tuple) and not a:
            pass
        elif not isinstance(a, (tuple, str, types.MethodType)) and self._again(path, a, b):
            pass
        else:
            self._todo.extend((path + step, x, y) for step, x, y in self._parts(path, a, b))

    def _again(self, path: str, a: Any, b: Any) -> bool:
        """Whether both have been visited before, as each other's counterparts."""
        first, other = self._twin
        was, is_ = first.get(id(a)), other.get(id(b))
        if was is None and is_ is None:
            first[id(a)], other[id(b)] = (id(b), path), (id(a), path)
            self._alive += [a, b]
            return False
        if was is None or is_ is None or was[0] != id(b):
            eager = f"the same object as {was[1]}" if was else "an object of its own"
            traced = f"the same object as {is_[1]}" if is_ else "an object of its own"
            raise Difference(path, f"eager {eager}, traced {traced}")
        return True

    def _parts(self, path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
        if isinstance(a, np.ndarray):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise Difference(path, f"eager {a.shape} {a.dtype}, traced {b.shape} {b.dtype}")
            relative, absolute = 1e-3 * self._tolerance, 1e-5 * self._tolerance
            if a.dtype.kind in "fiub" and not np.allclose(a, b, rtol=relative, atol=absolute, equal_nan=True):
                raise Difference(path, f"eager {a.ravel()[:3]}, traced {b.ravel()[:3]}", of_values=True)
            self.arrays.append((path, a, b))
        elif isinstance(a, TracedStep):
            yield ".__wrapped__", a._step, b._step
        elif isinstance(a, CompiledModel):
            yield ".model", a.model, b.model
        elif isinstance(a, torch.optim.Optimizer):
            for name in ("param_groups", "state", "defaults"):
                yield "." + name, getattr(a, name), getattr(b, name)
            yield from self._attributes(path, a, b, type(a).__module__.startswith("torch."))
        elif isinstance(a, type):
            if a.__module__ == self._module and b.__module__ == self._module:
                names = [n for n in vars(a) if not n.startswith("__") or n in ("__slots__",)]
                for name in names:
                    if name not in vars(b):
                        raise Difference(f"{path}.{name}", "only in eager")
                    yield "." + name, vars(a)[name], vars(b)[name]
        elif isinstance(a, types.FunctionType):
            if a.__module__ != self._module:
                return
            if (a.__code__.co_name, a.__code__.co_firstlineno) != (b.__code__.co_name, b.__code__.co_firstlineno):
                raise Difference(path, f"eager {a.__qualname__}, traced {b.__qualname__}")
            if hasattr(a, "registry") and hasattr(a, "dispatch"):  # singledispatch caches by the tensors' own types
                yield ".registry", dict(a.registry), dict(b.registry)
                return
            yield ".__defaults__", a.__defaults__, b.__defaults__
            yield ".__kwdefaults__", a.__kwdefaults__, b.__kwdefaults__
            yield ".__dict__", a.__dict__, b.__dict__
            for name, x, y in zip(a.__code__.co_freevars, a.__closure__ or (), b.__closure__ or (), strict=False):
                yield f".{name}", _in_cell(x), _in_cell(y)
        elif isinstance(a, types.MethodType):
            yield ".__self__", a.__self__, b.__self__
            yield ".__func__", a.__func__, b.__func__
        elif isinstance(a, functools.partial):
            yield ".func", a.func, b.func
            yield ".args", a.args, b.args
            yield ".keywords", a.keywords, b.keywords
        elif isinstance(a, functools._lru_cache_wrapper):  # call counts may differ
            yield ".__wrapped__", a.__wrapped__, b.__wrapped__
        elif isinstance(a, weakref.ref):
            yield "()", a(), b()
        elif isinstance(a, contextvars.ContextVar):
            yield ".get()", a.get(None), b.get(None)
        elif isinstance(a, types.GeneratorType):
            for frames in [(a.gi_frame, b.gi_frame)]:
                if (frames[0] is None) != (frames[1] is None):
                    raise Difference(path, "one generator is at its end, the other is not")
                if frames[0] is not None:
                    yield ".f_lineno", frames[0].f_lineno, frames[1].f_lineno
                    yield ".f_locals", dict(frames[0].f_locals), dict(frames[1].f_locals)
        elif isinstance(a, (collections.abc.Mapping, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
            yield from self._mapping(path, a, b)
        elif isinstance(a, (list, tuple, collections.deque, array.array, collections.UserList)):
            yield from self._sequence(path, list(a), list(b))
            if isinstance(a, collections.deque):
                yield ".maxlen", a.maxlen, b.maxlen
            if not isinstance(a, array.array):
                yield from self._attributes(path, a, b, plain=False)
        elif isinstance(a, (set, frozenset, weakref.WeakSet)):
            if all(map(_is_plain, a)):
                yield ".order", list(a), list(b)
            yield ".sorted", sorted(map(_hashed, a)), sorted(map(_hashed, b))
        elif isinstance(a, collections.abc.Iterator) and type(a).__module__ in ("builtins", "itertools"):
            yield (
                "...",
                list(itertools.islice(a, _ITEMS_OF_AN_ITERATOR)),
                list(itertools.islice(b, _ITEMS_OF_AN_ITERATOR)),
            )
        elif isinstance(a, BaseException):
            yield ".args", a.args, b.args
        else:
            yield from self._attributes(path, a, b, plain=False)

    def _sequence(self, path: str, a: list, b: list) -> Iterator[tuple[str, Any, Any]]:
        if len(a) != len(b):
            raise Difference(path, f"eager has {len(a)} items, traced {len(b)}")
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield f"[{i}]", x, y

    def _mapping(self, path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
        if len(a) != len(b):
            raise Difference(path, f"eager has the keys {_keys(a)}, traced {_keys(b)}")
        for i, ((k, x), (j, y)) in enumerate(zip(list(a.items()), list(b.items()), strict=True)):
            if _is_plain(k):
                if k != j and not (isinstance(k, int) and "hooks" in path):  # each handle has an id of its own
                    raise Difference(path, f"eager has the keys {_keys(a)}, traced {_keys(b)}")
                yield f"[{k!r}]" if path else f"{k}", x, y
            else:
                yield f".keys[{i}]", k, j
                yield f".values[{i}]", x, y
        if isinstance(a, collections.ChainMap):
            yield ".maps", a.maps, b.maps
        elif isinstance(a, collections.defaultdict):
            yield ".default_factory", a.default_factory, b.default_factory
        if not isinstance(a, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
            yield from self._attributes(path, a, b, plain=False)

    def _attributes(self, path: str, a: Any, b: Any, plain: bool) -> Iterator[tuple[str, Any, Any]]:
        """Attributes in `__dict__` and slots; for PyTorch's own objects, only those that a program may have set."""
        first, other = _state(a), _state(b)
        if isinstance(a, torch.optim.Optimizer):
            known = {"param_groups", "state", "defaults"}
            first = {k: v for k, v in first.items() if k not in known and not k.startswith("_") and k != "step"}
            other = {k: v for k, v in other.items() if k in first}
        if list(first) != list(other) and set(first) != set(other):
            raise Difference(path, f"eager has the attributes {_keys(first)}, traced {_keys(other)}")
        for name in first:
            yield f".{name}", first[name], other[name]


def _is_plain(key: Any) -> bool:
    return all(map(_is_plain, key)) if isinstance(key, tuple) else isinstance(key, (str, int, float, bool))


def _state(held: Any) -> dict[str, Any]:
    state = {}
    for cls in type(held).__mro__:
        slots = vars(cls).get("__slots__", ())
        if cls.__module__ in ("builtins", "collections", "itertools", "functools", "_thread"):
            continue
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(held, name):
                state[name] = getattr(held, name)
    try:
        state.update(object.__getattribute__(held, "__dict__"))
    except AttributeError:
        pass
    return state


def _in_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _hashed(held: Any) -> str:
    return repr(held) if isinstance(held, (str, int, float, bool, tuple)) else type(held).__qualname__


def _keys(mapping: Iterable[Any]) -> list[str]:
    return [str(k) if isinstance(k, (str, int, float, bool)) else type(k).__name__ for k in mapping]


def _brief(held: Any) -> str:
    if isinstance(held, torch.Tensor):
        return f"a tensor of shape {tuple(held.shape)}"
    return repr(held)[:80] if isinstance(held, (*_PLAIN, float)) else f"a {type(held).__qualname__}"
