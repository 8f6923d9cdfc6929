"""Functions, the variables that they share, and what is bound to other objects: methods, partials, references."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import random
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ....capture.input_texts import is_input
from ....compat.python_names import lru_cache_wrapper
from ....compat.torch_names import pytree
from .. import lru_caches
from ..access import MISSING, cell_content, definition, names_in
from ..bytecode import imported_modules
from ..guards import CellGuard
from ..kind import Kind, of, register
from ..packages import is_closed, is_closed_function, is_installed, is_runtime, own_module
from ..reconstruct import CallFrame, Make, Reconstructor, constant, is_constant
from ..snapshot import Snapshot
from ..states import CellContent, Content, Definition
from ..value_guards import Values
from .instances import WithAttributes, guard_attributes


@of(types.FunctionType)
class Function(Kind):
    """A function: its code and defaults, the globals that it mentions, and its closure."""

    def visit(self, obj: types.FunctionType, snapshot: Snapshot, stack: list[Any]) -> None:
        code, module = obj.__code__, own_module(obj)
        if is_runtime(module) or module is not None and is_closed(module):
            if obj.__closure__ and not is_runtime(module):  # a library's decorator around a user's function
                stack += [content for cell in obj.__closure__ if callable(content := cell_content(cell))]
            return
        installed = is_installed(module)
        if obj.__dict__ or not installed:
            snapshot.attributes(obj.__dict__, obj, stack)
        snapshot.functions.setdefault(code, []).append(obj)
        snapshot.keep(Definition(obj, definition(obj)))
        snapshot.globals(obj.__globals__, set(names_in(code)), installed, stack)
        if not installed:  # users seldom change what a package imports
            snapshot.set_in_modules(obj)
            stack += imported_modules(code, obj.__globals__)
        stack.extend(obj.__closure__ or ())
        stack.extend(obj.__defaults__ or ())
        stack.extend((obj.__kwdefaults__ or {}).values())

    def guard(self, obj: types.FunctionType, values: Values, description: str, name: str) -> None:
        if not is_closed_function(obj):
            values.function(obj)

    def make(self, obj: types.FunctionType, reconstructor: Reconstructor) -> Make:
        cells = [reconstructor.make(cell) for cell in obj.__closure__ or ()]
        if all(map(is_constant, cells)):
            return constant(obj)

        def make(env: CallFrame) -> Any:
            closure = tuple([cell(env) for cell in cells])
            new = types.FunctionType(obj.__code__, obj.__globals__, obj.__name__, obj.__defaults__, closure)
            new.__kwdefaults__ = obj.__kwdefaults__
            return functools.update_wrapper(new, obj)

        return make


@of(types.CellType)
class Cell(Kind):
    """A variable of an enclosing function."""

    def visit(self, obj: types.CellType, snapshot: Snapshot, stack: list[Any]) -> None:
        content = cell_content(obj)
        snapshot.keep(CellContent(obj, content))
        if content is not MISSING:
            stack.append(content)

    def guard(self, obj: types.CellType, values: Values, description: str, name: str) -> None:
        state = values.snapshot.state(CellContent, obj)
        if state is not None:
            values.cells.setdefault(id(obj), CellGuard(obj, state.before, description, name))
            values.value(state.before, description, name)

    def make(self, obj: types.CellType, reconstructor: Reconstructor) -> Make:
        content = reconstructor.make(obj.cell_contents)
        return reconstructor.once(obj, types.CellType, lambda new, env: setattr(new, "cell_contents", content(env)))


# -- what refers to other objects --


class Binding(WithAttributes):
    """Refers to other objects, which cannot be exchanged."""

    refers = True

    def __init__(self, referents: Callable[[Any], Iterable[Any]] = gc.get_referents) -> None:
        """`referents`: returns the objects that an object refers to."""
        self.referents = referents

    def visit_content(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        stack.extend(self.referents(obj))

    def guard(self, obj: Any, values: Values, description: str, name: str) -> None:
        guard_attributes(obj, values)
        for part in self.referents(obj):
            values.value(part, description, name)

    def make(self, obj: Any, reconstructor: Reconstructor) -> Make:
        return constant(obj)


# Methods of generators whose state is guarded in any case.
_OF_THE_PROCESS = {
    method
    for module in (random, np.random)
    for method in vars(module).values()
    if isinstance(method, types.BuiltinFunctionType)
}


def _owner_in_c(method: Any) -> Iterable[Any]:
    """The owner of a method of a class of C; none of a function of a module."""
    if method in _OF_THE_PROCESS or isinstance(method.__self__, (types.ModuleType, type)):
        return ()
    return (method.__self__,)


_HOLDERS: tuple[type, ...] = (
    slice, super, operator.itemgetter, operator.methodcaller, type(functools.cmp_to_key(lambda a, b: 0)),
    type({}.keys()), type({}.values()), type({}.items()),
)  # fmt: skip
register(_HOLDERS, Binding())
register((types.BuiltinFunctionType, types.MethodWrapperType), Binding(_owner_in_c))
register((property,), Binding(lambda obj: [f for f in (obj.fget, obj.fset, obj.fdel) if f is not None]))
register((functools.cached_property,), Binding(lambda obj: (obj.func,)))
register((staticmethod, classmethod), Binding(lambda obj: (obj.__func__,)))


class Method(Binding):
    """A method of a Python class."""

    def make(self, obj: types.MethodType, reconstructor: Reconstructor) -> Make:
        function, owner = reconstructor.make(obj.__func__), reconstructor.make(obj.__self__)
        return lambda env: types.MethodType(function(env), owner(env))


register((types.MethodType,), Method(lambda obj: (obj.__func__, obj.__self__)))


class Partial(Binding):
    """A function with arguments."""

    def guard(self, obj: functools.partial[Any], values: Values, description: str, name: str) -> None:
        super().guard(obj, values, description, name)
        values.fields(obj, ("func", "args", "keywords"), description, name)

    def make(self, obj: functools.partial[Any], reconstructor: Reconstructor) -> Make:
        make = reconstructor.make
        f, args, kwargs = make(obj.func), list(map(make, obj.args)), {k: make(v) for k, v in obj.keywords.items()}
        return lambda env: functools.partial(f(env), *[a(env) for a in args], **{k: v(env) for k, v in kwargs.items()})


register((functools.partial,), Partial(lambda obj: (obj.func, *obj.args, obj.keywords)))


def _behind(obj: Any) -> Iterable[Any]:
    """The object behind a weak reference or a proxy."""
    if isinstance(obj, weakref.ref):
        return (obj(),)
    with contextlib.suppress(ReferenceError):
        return (obj.__reduce_ex__.__self__,)
    return ()


class WeakReference(Binding):
    """A weak reference, or a proxy."""

    def guard(self, obj: Any, values: Values, description: str, name: str) -> None:
        if any(map(_may_expire, self.referents(obj))):
            values.weak = True
            values.unguardable[id(obj)] = (obj, f"{description} (a weak reference)")
            return
        super().guard(obj, values, description, name)


register((weakref.ref, weakref.ProxyType, weakref.CallableProxyType), WeakReference(_behind))


def _may_expire(held: Any) -> bool:
    """Whether a weak reference to it may expire, as far as is known. References to parts of the training itself do not,
    such as those of schedulers to their optimizer."""
    lasting = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type, types.FunctionType)
    return held is not None and not isinstance(held, lasting)


class CachedFunction(Binding):
    """A function behind `functools.lru_cache`, which a step may call without running it."""

    def visit_content(self, obj: Any, snapshot: Snapshot, stack: list[Any]) -> None:
        super().visit_content(obj, snapshot, stack)
        if isinstance(obj.__wrapped__, types.FunctionType):
            snapshot.cached.append(obj.__wrapped__)
            snapshot.keep(CachedResults(obj, lambda: lru_caches.results(obj)))
            if not is_installed(obj.__wrapped__.__module__):
                stack += lru_caches.results(obj)

    def guard(self, obj: Any, values: Values, description: str, name: str) -> None:
        super().guard(obj, values, description, name)
        if is_installed(obj.__module__):
            return
        results = lru_caches.results(obj)
        if any(map(is_input, results)):  # of this trace only
            obj.cache_clear()
            results = []
        # Results that this trace has added could not be copied before it, so the step is traced again.
        new = any(not values.is_leaf(result) and not values.snapshot.holds(result) for result in results)
        description = f"the cached results of {description}"
        values.read(id(obj), lru_caches.unchanged(obj), not new, description, name)
        for result in results:
            values.value(result, description, name)


class CachedResults(Content):
    """The results that an `lru_cache` holds. What an abandoned trace has added is dropped."""

    __slots__ = ()

    def restore(self) -> bool:
        before = set(map(id, self.before))
        new = [result for result in self.read() if id(result) not in before]
        # Those of before cannot be kept without them. They are lost where the new ones may be of the trace.
        if new and (not before or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(new))):
            self.held.cache_clear()
        return True


register((lru_cache_wrapper,), CachedFunction(lambda obj: (obj.__wrapped__,)))
