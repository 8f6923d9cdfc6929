"""`StepCache`: the compiled steps of a traced step, by kind of call, and retracing when its Python would differ.

A compiled step repeats what its Python code did when it was traced. Three mechanisms ensure that this is still right:

- At each call everything that its Python code has read is compared with its earlier value (`guards/`, some 0.2 ms for
  a transformer of 24 layers). If something has changed, the step is traced again, which takes a fraction of a second,
  and the two Programs are compared. If they are the same, nothing is compiled. Otherwise the new one is compiled, and a
  `GraphChangeWarning` names what has changed and where the Programs differ.
- Calls to the outside world (the time, a file) are found at the second call, at which the step is traced again while
  the device runs the first; such a step is traced at each call.
- For everything else, the step is traced again as often as takes less than 1% of the time. If the Programs differ then,
  the compiled step may have been run wrongly, which is a `GraphChangedError`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...capture import session
from ...errors import EagerStepWarning, GraphChangedError, GraphChangeWarning, TraceError
from ...interpreter import Undo, pause, paused_until
from ...program.source import here, warn
from ..backend import Backend, current_backend
from ..device import host_tensors
from ..guards.recording import record_calls
from ..lazy_jax import process_count
from ..pytrees import flatten
from .arguments import Arguments, ByIdentity, owner_of
from .cache_entries import CacheEntries, CacheEntry
from .owners import Shared
from .process_settings import modes, settings
from .reads import OutcomeChanged
from .request import MAX_RETRIES, Request
from .shapes import generalizes
from .untraced_calls import NewKinds

if TYPE_CHECKING:
    from .compiled_step import CompiledStep


# For how many calls, at first, steps are kept that are for other models or objects than that of a new one.
_PATIENCE = 64

# Backend, structure, shapes and dtypes, sharing among the arguments, modes and settings.
_Kind = tuple[Any, ...]


class StepCache:
    """Finds the compiled step for a call, or creates it.

    Attributes:
        kinds: the compiled steps by kind of call.
    """

    def __init__(self, name: str, refuse: bool, check: bool | str, reads: bool = False) -> None:
        """`reads`: whether the step may read values while it is traced."""
        self._reads = reads
        self.kinds: dict[_Kind, CacheEntries] = {}
        self._found: CompiledStep | None = None  # at the last call
        self._new_kinds = NewKinds()
        self._reported_new = False
        self._entries = CacheEntries(name, refuse, check, self._new_kinds)  # those that it was found among
        self._name = name
        self._refuse = refuse
        self._check = check
        # By id, arguments that the step also reaches in another way.
        self._shared: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # Whether its Python has run twice at a call, since it could not be traced, and written something twice.
        self._wrote_twice = False
        self._calls = 0
        self._patience = _PATIENCE
        self._dropped: set[tuple[Any, ...]] = set()

    def prepare(self, arguments: tuple[Any, ...]) -> None:
        """Before a call, let weights be on the backend, if a compiled step uses them; see `host_tensors`.

        Args:
            arguments: its positional and keyword arguments.
        """
        if not host_tensors.are_in_use():
            return
        used, _ = flatten(arguments)
        for entry in (entry for entries in self.kinds.values() for entry in entries.entries()):
            if entry.traced_each_time is None:  # else it fits no call
                used += entry.step.traced.owners.inputs.values()
        if host_tensors.are_among(used):
            host_tensors.end()

    def call(self, step: Callable[..., Any], arguments: Arguments, kind: tuple[Any, ...], backend: Backend) -> Any:
        """Call the compiled step.

        Args:
            kind: the arguments' shapes and dtypes.
        """
        if self._found is not None:
            self._found.wait_until_lowered()
        if self._shared:
            arguments.itself.update(i for i, leaf in arguments.data() if id(owner_of(leaf)) in self._shared)
        reads, reads_any = self._reads and backend.is_e2e_execution, self._may_run_untraced(backend)
        request = Request(step, arguments, backend, reads=reads_any, reads_by_all=reads and not reads_any)
        while True:
            try:
                return self._call(request, kind)
            except OutcomeChanged as changed:
                if request.reads_by_all and request.retries > MAX_RETRIES:
                    raise GraphChangedError(
                        f"{here()}: {self._name} branches on a number for which each branch computes another value, on "
                        "the other side of the decision. Decide by a number that does not depend on the decision."
                    ) from changed
                arguments.known.clear()
                request = request._replace(values_read=changed.values, retries=request.retries + 1)
            except Shared as shared:
                request = request._replace(retried=True)
                for i in shared.leaves:
                    owner = owner_of(arguments.leaves[i])
                    self._shared[id(owner)] = owner
                arguments.itself.update(shared.leaves)

    def _may_run_untraced(self, backend: Backend) -> bool:
        if backend.same_run is not None:  # PyTorch takes sums in another order
            return False
        return self._reads and backend.is_e2e_execution and process_count() == 1

    def run_untraced(
        self, why: TraceError, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the step's Python at this call, by PyTorch's kernels, because its arguments cannot be inputs.

        Raises:
            TraceError: `why`, where it cannot.
        """
        if not (why.can_run_eagerly and self._may_run_untraced(current_backend())):
            raise why
        with host_tensors.in_step():
            result = step(*args, **kwargs)
        self._entries.reports.report_eager(str(why))
        return result

    def _call(self, request: Request, kind: tuple[Any, ...]) -> Any:
        """Find or create the compiled step, and call it.

        Raises:
            Shared: if some arguments must be inputs themselves.
        """
        with Undo() as undo, undo:
            compiled = self.find(request, kind, undo)
            if compiled is not None and not request.backend.is_e2e_execution:
                return compiled.skip_execution(request.arguments)
            if compiled is not None:  # the call tells the current loop, which can fetch the next batch meanwhile
                result = compiled(request.arguments)
                self._entries.ran()
                return result
        args, kwargs = request.arguments.as_given()
        writes = self._entries.writes_untraced()
        try:
            with Undo() as undo, undo, host_tensors.in_step():
                if writes is not None:
                    record_calls(undo, writes.called, {}, [])
                result = request.step(*args, **kwargs)
        except Exception as error:
            self._entries.explain(error)
            raise
        self._entries.ran_untraced()
        if writes is not None and writes.calls:
            self._wrote_twice = True
            self._entries.reports.report_written_twice(writes.calls.values())
        return result

    def find(self, request: Request, kind: tuple[Any, ...], undo: Undo) -> CompiledStep | None:
        """Find or create the compiled step; None if the step reads values, and is run without a trace at this call.

        Raises:
            Shared: if some arguments must be inputs themselves.
        """
        backend, arguments = request.backend, request.arguments
        kind_of_call = (id(backend), arguments.spec, kind, arguments.key(), modes(), settings())
        self._calls += 1
        with session.tracing:  # models of other threads are reachable as well, and others trace these
            if kind_of_call not in self.kinds and self._runs_new_kind_untraced(kind_of_call, request):
                return None
            entries = self._entries = self.kinds[kind_of_call]
            entries.called = self._calls
            fits = entries.fits(request)
            if fits:
                self._new_kinds.fits(kind_of_call)
            elif self._wrote_twice and request.reads or entries.runs_untraced(request):
                return None
            similar = [] if fits else [v for other, v in self.kinds.items() if _is_similar(kind_of_call, other)]
            (pause if fits else paused_until)(undo)
            compiled = self._found = entries.step(request, similar)
            new = entries.entry_of(compiled)
            if new is not None:
                new.called = self._calls
                if not fits:
                    self._drop_stale(kind_of_call, new)
        return compiled

    def _runs_new_kind_untraced(self, kind: _Kind, request: Request) -> bool:
        """Begin with calls of a new kind; returns whether the step's Python runs at this one."""
        self._entries = CacheEntries(self._name, self._refuse, self._check, self._new_kinds)
        news, may_run = request.arguments.news, request.runs_where_weights_are and self._check != "always"
        self._new_kinds.note_newest(request.backend.models.newest)
        if not (may_run and self._new_kinds.run_untraced(kind)):
            self.kinds[kind] = self._entries
            if news is not None:
                warn(GraphChangeWarning(f"{here()}: {self._name} is recompiled for {news}."))
            return False
        if not self._reported_new:
            self._reported_new = True
            warn(
                EagerStepWarning(
                    f"{here()}: {self._name} is called with batches of another kind each time: now with "
                    f"{news or 'other arguments'}. From now on its Python runs at the first call of a new kind, by "
                    "PyTorch's kernels, and it is compiled for those that come again."
                )
            )
        return True

    @property
    def latest(self) -> CompiledStep | None:
        """The compiled step that was called last."""
        return self._found

    @property
    def traced_each_time(self) -> str | None:
        """Why the step of the last call must be traced at each call, if it must."""
        entry = self._entries.entry_of(self._found)
        return None if entry is None else entry.traced_each_time

    def steps(self) -> list[CompiledStep]:
        """All compiled steps."""
        return [step for versions in self.kinds.values() for step in versions.steps()]

    def compilations(self) -> int:
        """The number of cached steps that were compiled."""
        return len({id(step.executable) for step in self.steps() if step.is_compiled})

    def _drop_stale(self, kind: _Kind, new: CacheEntry) -> None:
        """When a step is new, drop those for other models or objects that no call has been of for some time, since they
        keep these alive: as a search over settings has others for each trial. If one comes back, as those of many
        models that are trained in turns, they are kept for longer. One for a part of its weights, as for an evaluation,
        is not for other models."""
        objects = _objects_of(kind)
        if (*new.made_for, objects) in self._dropped:
            self._patience *= 2
        oldest = self._calls - self._patience
        for other, entries in list(self.kinds.items()):
            of_objects = _objects_of(other)
            for entry in list(entries.entries()):
                is_for_them = entry.weights <= new.weights or entry.weights >= new.weights
                if entry.called < oldest and not (is_for_them and of_objects == objects):
                    entries.drop(entry)
                    if all(each.is_weak for each in of_objects):
                        self._dropped.add((*entry.made_for, of_objects))
            if entries.called < oldest and of_objects != objects:
                del self.kinds[other]


def _is_similar(setting: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether what was compiled for the setting `other` may do for `setting`: without its last part, the process's
    settings, and without the values of what varies."""
    (backend, spec, kind), (backend_of_other, other_spec, other_kind) = setting[:3], other[:3]
    if (backend, spec, *setting[3:-1]) != (backend_of_other, other_spec, *other[3:-1]):
        return False
    return generalizes(kind, other_kind)


def _objects_of(kind: _Kind) -> tuple[ByIdentity, ...]:
    """The objects that the compiled steps of a kind of call are for."""
    _, _, leaves, more, *_ = kind
    passed = [held for _, held in more[2]] if more else []
    return (*passed, *(leaf[1] for leaf in leaves if type(leaf[1]) is ByIdentity))
