"""Estimates of a segment's peak scratch memory and memory traffic, by how XLA fuses and orders operations."""

from __future__ import annotations

from typing import NamedTuple

# Primitives that only reshape an array; partial sums pass through them.
RESHAPING = frozenset({"transpose", "reshape", "squeeze", "convert_element_type", "copy", "copy_p"})
# Primitives that XLA fuses into the readers of their results, which are not stored.
_FUSED = RESHAPING | frozenset(
    """abs add add_any and atan2 bitcast_convert_type broadcast_in_dim ceil clamp concatenate cos cosh div eq erf erfc
    erf_inv exp exp2 expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg nextafter
    not optimization_barrier or pad pow real imag rem rev round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh slice sqrt square stop_gradient sub tan tanh xor""".split()
)
# Operands of these are in memory; other operations are fused with the producers of their operands.
_OPERANDS_IN_MEMORY = frozenset({"dot_general", "conv_general_dilated", "sort", "sent"})
# Primitives that read only as much of an array as they return.
_PARTS = frozenset({"slice", "dynamic_slice", "gather"})
# The bytes up to which XLA combines reductions (`--xla_gpu_all_reduce_combine_threshold_bytes`, and likewise on a CPU).
_COMBINED = 30 << 20


class FusionNode(NamedTuple):
    """A computed value.

    Attributes:
        primitive: the JAX primitive; `"sent"` for a collective.
        bytes: of the result, on one device.
        reads: the numbers of the nodes that it reads.
        reduced: for a cross-device reduction, its axes.
    """

    primitive: str
    bytes: int
    reads: tuple[int, ...]
    reduced: tuple[str, ...] | None = None


class FusedKernel(NamedTuple):
    """A fused kernel: an operation, with those that are fused into it.

    Attributes:
        flops: of the operation that writes the result.
        bytes: read and written in memory, on one device.
    """

    flops: float
    bytes: int


class Memory:
    """The values computed by a segment, in order.

    Attributes:
        preallocated: the numbers of nodes that are not scratch memory.
        flops: the floating-point operations of a node, by its number.
    """

    def __init__(self) -> None:
        self.nodes: list[FusionNode] = []
        self.preallocated: set[int] = set()
        self.flops: dict[int, float] = {}

    def add(self, primitive: str, nbytes: int, reads: tuple[int, ...], reduced: tuple[str, ...] | None = None) -> int:
        """Add a node and return its number."""
        self.nodes.append(FusionNode(primitive, nbytes, reads, reduced))
        return len(self.nodes) - 1

    def peak(self, outputs: set[int]) -> int:
        """The peak of scratch memory: values that are not fused live until they are last read. Computed values may use
        the memory of outputs that do not exist yet, but received ones may not."""
        nodes = self.nodes
        stored, reads = self._fused(outputs)
        order, together = self._order()
        order = [n for n in order if stored[n]]
        last = {source: together.get(n, n) for n in order for source in reads[n]}
        ends: dict[int, list[int]] = {}
        for source, n in last.items():
            ends.setdefault(n, []).append(source)
        allocated = {n for n in outputs if n not in self.preallocated}
        room = sum(nodes[n].bytes for n in allocated)
        received, computed, most = 0, 0, 0
        for n in order:
            if n in allocated:
                room -= nodes[n].bytes
            elif n in last and n not in self.preallocated:
                if nodes[n].primitive == "sent":
                    received += nodes[n].bytes
                else:
                    computed += nodes[n].bytes
            most = max(most, received + max(0, computed - room))
            for source in ends.get(n, ()):
                if source in allocated or source in self.preallocated:
                    continue
                if nodes[source].primitive == "sent":
                    received -= nodes[source].bytes
                else:
                    computed -= nodes[source].bytes
        return most

    def kernels(self, outputs: set[int]) -> list[FusedKernel]:
        """The fused kernels, with the memory that each reads and writes; without collectives."""
        stored, reads = self._fused(outputs)
        return [
            FusedKernel(self.flops.get(n, 0.0), sum(reads[n].values()) + node.bytes)
            for n, node in enumerate(self.nodes)
            if stored[n] and node.primitive not in ("input", "sent")
        ]

    def _fused(self, outputs: set[int]) -> tuple[list[bool], list[dict[int, int]]]:
        """Whether each node's result is stored in memory, and how many bytes each node reads of such results."""
        nodes = self.nodes
        stored = [node.primitive not in _FUSED for node in nodes]
        for node in nodes:
            if node.primitive in _OPERANDS_IN_MEMORY:
                for read in node.reads:
                    stored[read] = True
        for n in (*outputs, *self.preallocated):
            stored[n] = True
        reads: list[dict[int, int]] = []
        for node in nodes:
            bytes_by_source: dict[int, int] = {}
            for read in node.reads:
                for source, nbytes in {read: nodes[read].bytes}.items() if stored[read] else reads[read].items():
                    bytes_by_source[source] = min(
                        bytes_by_source.get(source, 0) + nbytes, nodes[source].bytes
                    )  # partial reads add up
            if node.primitive in _PARTS:
                bytes_by_source = {source: min(nbytes, node.bytes) for source, nbytes in bytes_by_source.items()}
            reads.append(bytes_by_source)
        return stored, reads

    def _order(self) -> tuple[list[int], dict[int, int]]:
        """The nodes in XLA's order: reductions along the same axes, up to some size, are combined into one operation,
        at the position of the last. Also returns, for each of these, the last one of its operation."""
        nodes = self.nodes
        order: list[int] = []
        together: dict[int, int] = {}
        waiting: list[int] = []  # nodes that depend on a delayed reduction
        open_: dict[tuple[str, ...], list[int]] = {}
        needs: dict[int, frozenset[tuple[str, ...]]] = {}  # axes of delayed reductions on which nodes depend

        def close(axes: tuple[str, ...]) -> None:
            members = open_.pop(axes)
            for n in members:
                needs.pop(n)
                together[n] = members[-1]
            order.extend(members)
            still = []
            for n in waiting:
                needs[n] = frozenset().union(*(needs.get(read, frozenset()) for read in nodes[n].reads))
                if needs[n]:
                    still.append(n)
                else:
                    needs.pop(n)
                    order.append(n)
            waiting[:] = still

        for n, node in enumerate(nodes):
            axes = nodes[n].reduced
            if axes is not None:
                members = open_.get(axes, [])
                size = sum(nodes[m].bytes for m in members) + node.bytes
                while pending := frozenset().union(*(needs.get(read, frozenset()) for read in node.reads)):
                    close(next(iter(pending)))
                if members and axes in open_ and size > _COMBINED:
                    close(axes)
                open_.setdefault(axes, []).append(n)
                needs[n] = frozenset({axes})
                continue
            delayed = (needs.get(read, frozenset()) for read in node.reads)
            pending = frozenset().union(*delayed) if needs else frozenset()
            if pending:
                needs[n] = pending
                waiting.append(n)
            else:
                order.append(n)
        while open_:
            close(next(iter(open_)))
        return order, together
