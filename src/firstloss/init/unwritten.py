"""`firstloss.check_init`: find weights that nothing has written, in scripts as they are.

Memory from `to_empty` or `torch.empty` holds whatever was there before. A dispatch mode follows which elements of such
memory have been written since, and who reads others; at the end the parameters and buffers among them are named.
Reductions, products and the like of unwritten elements are reads; copies and casts of them are unwritten, too. So is
what is computed from them without gradients, as initialization does.
"""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.ops import aten

from ..capture.collectives import COPYING
from ..capture.op_call import Traits, is_composite, traits_of
from ..compat.torch_names import (
    OpOverload,
    StorageWeakRef,
    TorchDispatchMode,
    buffers_of,
    current_graph_task_id,
    local_tensor_or,
    parameters_of,
    pytree,
    schema_of,
    unsaved_buffers_of,
)
from ..errors import CaptureError, RankDependentWeightsWarning, UnwrittenWeightsError, UnwrittenWeightsWarning
from ..program.source import Source, here, warn
from .memories import Memories, address, has_memory
from .rank_draws import Draws, RankDrawnWeight

# These hand out memory as it is.
_HAND_OUT = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.empty_permuted.default,
}  # fmt: skip

# These use a tensor's shape and type alone.
_READ_NOTHING = {
    *_HAND_OUT, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.rand_like.default,
    aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.is_same_size.default, aten.set_.source_Tensor,
    aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.resize_.default,
}  # fmt: skip

# These copy elements, which then are as unwritten as they were.
_COPY = {
    aten.clone.default, aten._to_copy.default, aten.copy_.default, aten.cat.default, aten.stack.default,
    aten._foreach_copy_.default, aten.contiguous.default,
}  # fmt: skip

# Of these, those that copy each element to the same place.
_COPY_EACH = _COPY - {aten.cat.default, aten.stack.default}

# The pattern of what is computed from other elements than those at the same place.
_NONE = torch.zeros((), dtype=torch.bool)

# These write all elements of each tensor in their first argument, a list.
_FILL_LISTS = {aten._foreach_zero_.default, aten._foreach_copy_.default}

# Collectives that overwrite the tensors in their first argument; `broadcast_` does, except on one rank.
_RECEIVE = {*COPYING, "allgather_coalesced_", "recv_", "recv_any_source_"}

# These write some elements of their first argument: which, the same operation says if this argument is true.
_WRITE_SOME = {
    aten.index_put_.default: "values", aten._index_put_impl_.default: "values",
    aten.index_fill_.int_Scalar: "value", aten.index_fill_.int_Tensor: "value", aten.masked_fill_.Scalar: "value",
    aten.masked_fill_.Tensor: "value", aten.scatter_.value: "value", aten.scatter_.src: "src",
    aten.index_copy_.default: "source", aten.fill_diagonal_.default: "fill_value",
}  # fmt: skip


class UnwrittenWeight(NamedTuple):
    """A parameter or a buffer that nothing has written, or not all of.

    Attributes:
        name: its name in the outermost module that holds it.
        kind: "parameter", "buffer" or "non-persistent buffer".
        owner: the class of the module that holds it, and the line of that class.
        shape: its shape; on several ranks, that of this rank's part.
        elements: how many elements are unwritten.
        handed_out: the line whose memory it is.
        read: the first line that has read it; None if none has.
    """

    name: str
    kind: str
    owner: str
    shape: tuple[int, ...]
    elements: int
    handed_out: Source
    read: Source | None

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "a number"
        part = "" if self.elements == math.prod(self.shape) else f"{self.elements:,} elements of it "
        read = "never read" if self.read is None else f"first read at {self.read}"
        return (
            f"{self.name}: {part}({self.kind}, {size}, of {self.owner}) unwritten memory from {self.handed_out}, {read}"
        )


class _Memory:
    """Memory that was handed out as it was, and which of its elements have been written since."""

    def __init__(self, tensor: torch.Tensor, line: Source) -> None:
        storage = tensor.untyped_storage()
        self.storage = StorageWeakRef(storage)
        self.line = line
        self.read: Source | None = None
        self._itemsize = tensor.itemsize
        self._count = storage.nbytes() // tensor.itemsize
        self._written: torch.Tensor | None = None  # for each element; None: none

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of `tensor` among those of `_written`."""
        assert self._written is not None
        if tensor.itemsize != self._itemsize:  # a view with another dtype: all elements that it overlaps
            ratio = tensor.itemsize / self._itemsize
            begin = int(tensor.storage_offset() * ratio)
            return self._written[begin : begin + max(1, int(_span(tensor) * ratio))]
        return self._written.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def unwritten(self, tensor: torch.Tensor) -> int:
        """How many elements of `tensor` are unwritten."""
        if self._written is None:
            return tensor.numel()
        return int(self._part(tensor).logical_not().sum())

    def write(self, tensor: torch.Tensor) -> bool:
        """All elements of `tensor` have been written; returns whether no element of the memory is unwritten now."""
        if tensor.numel() * tensor.itemsize >= self._count * self._itemsize:
            return True
        self._begin()
        self._part(tensor).fill_(True)
        return False

    def write_some(
        self, op: OpOverload, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], is_written: bool
    ) -> None:
        """`op` has written those elements of `tensor` that its arguments say, or copied unwritten ones to them."""
        names = [argument.name for argument in schema_of(op).arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if tensor.itemsize != self._itemsize or given.get("accumulate"):
            return
        self._begin()
        value = given[_WRITE_SOME[op]]
        pattern = torch.full_like(value, is_written, dtype=torch.bool) if torch.is_tensor(value) else is_written
        op(**given | {names[0]: self._part(tensor), _WRITE_SOME[op]: pattern})

    def write_all(self) -> None:
        """All elements have been written, as far as is known until the next call of `spoil`."""
        self._begin()
        assert self._written is not None
        self._written.fill_(True)

    def pattern(self, tensor: torch.Tensor) -> torch.Tensor:
        """Which elements of `tensor` have been written."""
        if self._written is None or tensor.itemsize != self._itemsize:
            return torch.zeros(tensor.shape, dtype=torch.bool)
        return self._part(tensor).clone()

    def spoil(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Elements of `tensor` were computed from others: those are unwritten for which `source`, their pattern, has
        False; all, if it is not known which they were computed from."""
        self._begin()
        part = self._part(tensor)
        try:
            part.logical_and_(source)
        except RuntimeError:  # another shape, or a view with another dtype
            part.fill_(False)

    def _begin(self) -> None:
        if self._written is None:
            self._written = torch.zeros(self._count, dtype=torch.bool)


def _span(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _Watch(TorchDispatchMode):
    """Follows memory that is handed out while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Memories[_Memory] = Memories()
        self.draws = Draws()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler (a second) to wrap the method below

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        foreign = [kind for kind in types if not _is_plain(kind)]
        if foreign and all(hasattr(kind, "__tensor_flatten__") for kind in foreign):
            return NotImplemented  # the operations on tensors inside of it, such as a DTensor's shard, are followed
        if foreign:  # it has no memory, as a FakeTensor
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        traits = traits_of(func)
        if not (self.memory or self.draws or func in _HAND_OUT or traits.random is not None):
            return func(*args, **kwargs)
        return self._follow(func, traits, args, kwargs)

    def _follow(self, op: OpOverload, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = [
            tensor
            for position in traits.writes
            for tensor in _tensors(kwargs.get(position) if isinstance(position, str) else args[position])
        ]
        fills = traits.fill or traits.out or op in _FILL_LISTS
        if traits.namespace == "c10d" and _receives(op, args):
            written, fills = _tensors(args[0]), True
        read = [] if traits.view or op in _READ_NOTHING else _tensors((args, kwargs))
        if fills or op in _WRITE_SOME:
            for tensor in written if read else ():
                del read[next(i for i, other in enumerate(read) if other is tensor)]  # copy_ may read it, too
        garbage = []  # what it copies or computes from
        for tensor in read:
            memory = self.memory.of(tensor)
            if memory is not None and memory.unwritten(tensor):
                if op not in _COPY:
                    memory.read = memory.read or here()
                if op in _COPY or traits.namespace != "c10d" and _initializes(traits, read):
                    garbage.append((tensor, memory, memory.pattern(tensor)))
        result = op(*args, **kwargs)
        self.draws.follow(traits, fills, read, written, [] if written or op in _READ_NOTHING else _tensors(result))
        if op in _HAND_OUT:
            self._hand_out(result, here())
        elif op in _WRITE_SOME:
            for tensor in written:
                memory = self.memory.of(tensor)
                if memory is not None:
                    memory.write_some(op, tensor, args, kwargs, is_written=not garbage)
        elif fills or garbage:
            elementwise = op in _COPY_EACH or torch.Tag.pointwise in op.tags
            for number, tensor in enumerate(written or _tensors(result)):
                of_it = [g for g in garbage if op not in _FILL_LISTS or g[0] is args[1][number]]
                sources = [(memory, pattern if elementwise else _NONE) for _, memory, pattern in of_it]
                self._compute(tensor, sources, is_new=fills or not written)
        return result

    def _hand_out(self, tensor: torch.Tensor, line: Source) -> None:
        if _is_plain(type(tensor)) and has_memory(tensor):
            self.memory.put(tensor, _Memory(tensor, line))

    def _compute(self, tensor: torch.Tensor, sources: list[tuple[_Memory, torch.Tensor]], is_new: bool) -> None:
        """`tensor` has been computed from tensors in these memories, with these patterns, some of whose elements are
        unwritten; if it `is_new`, from nothing else."""
        if self.memory.of(tensor) is None and sources:
            self._hand_out(tensor, sources[0][0].line)
            if (memory := self.memory.of(tensor)) is not None:
                memory.write_all()
        if (memory := self.memory.of(tensor)) is None:
            return
        if is_new and memory.write(tensor):
            if not sources:
                del self.memory[address(tensor)]
                return
            memory.write_all()
        for _, pattern in sources:
            memory.spoil(tensor, pattern)

    def unwritten(self) -> list[UnwrittenWeight]:
        """The unwritten parameters and buffers of all modules that exist, each once."""
        self.memory.forget()
        found = []
        for name, kind, owner, tensor in self.weights() if self.memory else ():
            local = local_tensor_or(tensor, tensor)
            memory = self.memory.of(local)
            elements = 0 if memory is None else memory.unwritten(local)
            if memory is not None and elements:
                found.append(UnwrittenWeight(name, kind, owner, tuple(local.shape), elements, memory.line, memory.read))
        return found

    @staticmethod
    def weights() -> Iterator[tuple[str, str, str, torch.Tensor]]:
        """Name, kind, owner and tensor of the parameters and buffers of all modules that exist, each once."""
        found: set[int] = set()
        for root in _outermost_modules():
            for name, owner, kind, tensor in _weights_of(root):
                if id(tensor) not in found:
                    found.add(id(tensor))
                    yield name, kind, _described_class(owner), tensor


def _initializes(traits: Traits, read: list[torch.Tensor]) -> bool:
    """Whether what is computed now may be an initial value, rather than an activation, a gradient or an update."""
    if traits.is_foreach or current_graph_task_id() != -1:
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read))


def _receives(op: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether a collective overwrites the tensors in its first argument, on this rank."""
    name = schema_of(op).name.partition("::")[2]
    if name == "broadcast_":
        return args[2] != torch.distributed.ProcessGroup.unbox(args[1]).rank()
    return name in _RECEIVE


def _is_plain(kind: type) -> bool:
    return not issubclass(kind, torch.Tensor) or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _outermost_modules() -> list[nn.Module]:
    """All modules that exist, except those inside others and those whose constructor has not begun."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    modules = [module for module in found if "_modules" in vars(module)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def _weights_of(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Name, module, kind and tensor of all parameters and buffers."""
    for prefix, module in root.named_modules():
        before = f"{prefix}." if prefix else ""
        parameters, buffers = parameters_of(module), buffers_of(module)
        kinds = dict.fromkeys(parameters, "parameter") | dict.fromkeys(buffers, "buffer")
        kinds |= dict.fromkeys(unsaved_buffers_of(module), "non-persistent buffer")
        for name, tensor in (*parameters.items(), *buffers.items()):
            if tensor is not None:
                yield before + name, module, kinds[name], tensor


def _described_class(module: nn.Module) -> str:
    """The name of a module's class, and its line."""
    for kind in type(module).__mro__:
        try:
            if issubclass(kind, nn.Module):  # not FSDP2's, which has been put in front
                return f"{kind.__qualname__} at {inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
        except (OSError, TypeError):  # made by FSDP2, or defined in a console
            continue
    return type(module).__qualname__


def check_init(action: str = "raise") -> InitCheck:
    """Context that finds parameters and buffers that are read or trained although nothing has written them.

    For scripts that construct on the meta device, call `to_empty`, initialize and load by themselves. Put it around all
    of that and some training steps. It runs the script as it is, several times as slowly.

    Examples:
        >>> with fl.check_init("report") as check:
        ...     with torch.device("meta"):
        ...         model = nn.BatchNorm1d(4)
        ...     _ = model.to_empty(device="cpu")
        ...     nn.init.ones_(model.weight)  # but not the bias, and not the statistics
        Parameter containing:
        tensor([1., 1., 1., 1.], requires_grad=True)
        >>> [weight.name for weight in check.unwritten]
        ['bias', 'running_mean', 'running_var', 'num_batches_tracked']

    Args:
        action: what to do at the end of the block if there are any: "raise" an `UnwrittenWeightsError`, "warn" with an
            `UnwrittenWeightsWarning`, or only "report" them in `unwritten`. Unless it is "report", weights whose
            values depend on the number of ranks are a `RankDependentWeightsWarning`.

    Returns:
        A context manager; after the block, its `unwritten` has the weights, each with the line that has handed out its
        memory, the first line that has read it, and the class that should have written it. Its `drawn_by_rank` has
        those that each rank has drawn for itself, with the line; to compare whole weights, a rank waits for the next
        one to leave its block, a minute at most.

    Raises:
        CaptureError: inside `fl.deferred()`, where nothing is computed; for another `action`.
    """
    if action not in ("raise", "warn", "report"):
        raise CaptureError(f'{here()}: check_init({action!r}): write "raise", "warn" or "report".')
    return InitCheck(action)


class InitCheck:
    """See `check_init`.

    Attributes:
        unwritten: after the block, the unwritten parameters and buffers.
        drawn_by_rank: after the block, those whose values depend on the number of ranks.
    """

    def __init__(self, action: str) -> None:
        self._action = action
        self._watch = _Watch()
        self.unwritten: list[UnwrittenWeight] = []
        self.drawn_by_rank: list[RankDrawnWeight] = []

    def __enter__(self) -> InitCheck:
        from ..capture import session

        if session.depth or session.trace is not None:
            raise CaptureError(f"{here()}: check_init follows what is computed; nothing is while models are deferred.")
        self._watch.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        self._watch.__exit__(kind, *exception)
        self.unwritten = self._watch.unwritten()
        if kind is None:
            self.drawn_by_rank = self._watch.draws.found(self._watch.weights())
        self._watch.memory.clear()
        self._watch.draws.clear()
        if kind is not None or self._action == "report":
            return
        if self.drawn_by_rank:
            warn(RankDependentWeightsWarning(_message(self.drawn_by_rank, *_BY_RANK)))
        if self.unwritten:
            message = _message(self.unwritten, *_UNWRITTEN)
            if self._action == "raise":
                raise UnwrittenWeightsError(message)
            warn(UnwrittenWeightsWarning(message))


_MOST_LINES = 20

# What is said of weights, and what to do.
_UNWRITTEN = (
    "hold whatever was in their memory before",
    "Write each of them where the module's class initializes its weights, or construct with firstloss.deferred_init in "
    "place of the meta device, which needs no such code.",
)
_BY_RANK = (
    "have values that depend on the number of ranks, since each rank draws its own",
    "Draw whole weights and cut them: construct with firstloss.deferred_init, shard, and call "
    "firstloss.materialize_module, which computes each rank's part alone.",
)


def _message(weights: Sequence[UnwrittenWeight] | Sequence[RankDrawnWeight], what: str, advice: str) -> str:
    """The message of the error or the warning."""
    lines = [f"  {weight}" for weight in weights[:_MOST_LINES]]
    more = len(weights) - len(lines)
    if more:
        lines.append(f"  and {more:,} more")
    return "\n".join([f"{len(weights):,} parameters and buffers {what}:", *lines, advice])
