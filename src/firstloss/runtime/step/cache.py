"""`StepCache`: the compiled steps of a traced step, one for each kind of call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...capture import session
from ...interpreter import Undo, pause, paused_until
from ..backend import Backend
from .arguments import Arguments, Itself, owner_of
from .process_settings import modes, settings
from .retracing import CacheEntries, Request
from .tracing import Shared

if TYPE_CHECKING:
    from .compiled_step import CompiledStep

_MOST_FOR_CERTAIN = 32

# Backend, structure, shapes and dtypes, sharing among the arguments, modes and settings; and the state of the weights.
_Key = tuple[tuple, tuple]


class StepCache:
    """Finds the compiled step for a call, or creates it.

    Attributes:
        kinds: the compiled steps by kind of call.
    """

    def __init__(self, name: str, refuse: bool, check: bool | str) -> None:
        self.kinds: dict[_Key, CacheEntries] = {}
        self._latest: CacheEntries | None = None  # of the last call
        self._found: CompiledStep | None = None  # at the last call
        self._name = name
        self._refuse = refuse
        self._check = check
        self._seen: tuple[Backend, int] | None = None
        self._all: list[torch.nn.Parameter] = []
        # By id, arguments that the step also reaches in another way.
        self._shared: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._read_later: dict[
            tuple[CacheEntries, int], bool
        ] = {}  # whether they read the parameters from this index on

    def call(self, step: Callable[..., Any], arguments: Arguments, kind: tuple, backend: Backend) -> Any:
        """Call the compiled step.

        Args:
            kind: the arguments' shapes and dtypes.
        """
        if self._found is not None:
            self._found.wait_until_lowered()
        if self._shared:
            arguments.itself.update(i for i, leaf in arguments.data() if id(owner_of(leaf)) in self._shared)
        again = False
        while True:
            try:
                return self._call(Request(step, arguments, backend, again), kind)
            except Shared as shared:
                again = True
                for i in shared.leaves:
                    owner = owner_of(arguments.leaves[i])
                    self._shared[id(owner)] = owner
                arguments.itself.update(shared.leaves)

    def _call(self, request: Request, kind: tuple) -> Any:
        """Find or create the compiled step, and call it.

        Raises:
            Shared: if some arguments must be inputs themselves.
        """
        with Undo() as undo, undo:
            compiled = self.find(request, kind, undo)
            if not request.backend.is_e2e_execution:
                return compiled.skip_execution(request.arguments)
            # The call tells the current loop, which can fetch the next batch meanwhile.
            return compiled(request.arguments)

    def find(self, request: Request, kind: tuple, undo: Undo) -> CompiledStep:
        """Find or create the compiled step.

        Raises:
            Shared: if some arguments must be inputs themselves.
        """
        backend, arguments = request.backend, request.arguments
        setting = (id(backend), arguments.spec, kind, arguments.key(), modes(), settings())
        # Models of other threads are reachable as well, and their gradients come and go while these trace.
        with session.tracing:
            versions = self._fitting(setting, self._parameters(backend))
            fits = versions is not None
            if versions is None:  # parameters may have been replaced
                self._seen = None
                key = setting, self._parameters(backend)
                versions = self._fitting(*key) or self.kinds.setdefault(
                    key, CacheEntries(self._name, self._refuse, self._check)
                )
                self._forget_some()
            similar = [] if fits else [v for (other, _), v in self.kinds.items() if other[:-1] == setting[:-1]]
            (pause if fits else paused_until)(undo)
            compiled = self._found = versions.step(request, similar)
            self._latest = versions
        return compiled

    @property
    def latest(self) -> CompiledStep | None:
        """The compiled step that was called last."""
        return None if self._latest is None else self._latest.latest()

    def steps(self) -> list[CompiledStep]:
        """All compiled steps."""
        return [step for versions in self.kinds.values() for step in versions.steps()]

    def compilations(self) -> int:
        """The number of cached steps that were compiled."""
        return sum(len({id(step.executable) for step in versions.steps()}) for versions in self.kinds.values())

    def _forget_some(self) -> None:
        """Drop the oldest steps that are specific to certain objects, which they keep alive."""
        certain = [key for key in self.kinds if _is_for_certain(*key[0][2:4])]
        for key in certain[:-_MOST_FOR_CERTAIN]:
            del self.kinds[key]

    def _fitting(self, setting: tuple, weights: tuple) -> CacheEntries | None:
        """The entries that fit the weights: traced with the same weights, or before there were models that they do not
        read."""
        known = self.kinds.get((setting, weights))
        if known is not None and known.fits():
            return known
        for (other, fewer), versions in self.kinds.items():
            count = len(fewer)
            if other == setting and count < len(weights) and weights[:count] == fewer:
                reads = self._read_later.get((versions, count))
                if reads is None:
                    reads = self._read_later[versions, count] = versions.reads(self._all[count:])
                if not reads and versions.fits():
                    return versions
        return None

    def _parameters(self, backend: Backend) -> tuple:
        """For each parameter, whether it requires a gradient, and whether it has one, to which the step then adds.

        Looked up when no step fits; a replaced parameter is noticed as a change of its module.
        """
        if self._seen is None or self._seen[0] is not backend or self._seen[1] != len(backend.models):
            self._seen = (backend, len(backend.models))
            self._all = [p for model in backend.models for p in model.parameters()]
            self._read_later = {}
        return tuple([(p.requires_grad, p.grad is not None) for p in self._all])


def _is_for_certain(kind: tuple, more: tuple) -> bool:
    """Whether a kind belongs to steps that are specific to certain objects."""
    return bool(more and more[2]) or any(type(leaf[1]) is Itself for leaf in kind)
