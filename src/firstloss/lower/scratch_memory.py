"""Estimate a segment's peak scratch memory and its memory traffic, by how XLA fuses and orders operations."""

from __future__ import annotations

from typing import NamedTuple

# They have an array's content in another shape: what is summed stays in parts through them.
RESHAPING = frozenset({"transpose", "reshape", "squeeze", "convert_element_type", "copy", "copy_p"})
# XLA computes these where their results are read, and keeps none of them.
_FUSED = RESHAPING | frozenset(
    """abs add add_any and atan2 bitcast_convert_type broadcast_in_dim ceil clamp concatenate cos cosh div eq erf erfc
    erf_inv exp exp2 expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg nextafter
    not optimization_barrier or pad pow real imag rem rev round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh slice sqrt square stop_gradient sub tan tanh xor""".split()
)
# What these read is in memory; other operations are fused with those that make what they read.
_OPERANDS_IN_MEMORY = frozenset({"dot_general", "conv_general_dilated", "sort", "sent"})
# These read as much of an array as they give.
_PARTS = frozenset({"slice", "dynamic_slice", "gather"})
# Bytes of reductions that XLA makes one of (its `--xla_gpu_all_reduce_combine_threshold_bytes`, and the CPU's).
_COMBINED = 30 << 20


class FusionNode(NamedTuple):
    """What is computed.

    Attributes:
        primitive: the operation of JAX's; `"sent"` for a collective.
        bytes: of the result, on one device.
        reads: the numbers of the nodes that it reads.
        reduced: of a reduction between devices, the axes along which they take part.
    """

    primitive: str
    bytes: int
    reads: tuple[int, ...]
    reduced: tuple[str, ...] | None = None


class FusedKernel(NamedTuple):
    """What is computed in one go: an operation, with those that are fused with it.

    Attributes:
        flops: of the operation, which makes what is written.
        bytes: that it reads and writes in memory, on one device.
    """

    flops: float
    bytes: int


class Memory:
    """What a segment computes, in the order of its operations.

    Attributes:
        given: the numbers of nodes that are no scratch memory.
        flops: floating-point operations of a node, by its number.
    """

    def __init__(self) -> None:
        self.nodes: list[FusionNode] = []
        self.given: set[int] = set()
        self.flops: dict[int, float] = {}

    def add(self, primitive: str, nbytes: int, reads: tuple[int, ...], reduced: tuple[str, ...] | None = None) -> int:
        """Add a node, and return its number."""
        self.nodes.append(FusionNode(primitive, nbytes, reads, reduced))
        return len(self.nodes) - 1

    def peak(self, outputs: set[int]) -> int:
        """Scratch memory at its fullest: what is not fused lives until it was read last. What is computed may be in
        the memory of outputs that are not there yet, but not what is received."""
        nodes = self.nodes
        kept, reads = self._fused(outputs)
        order, together = self._order()
        order = [n for n in order if kept[n]]
        last = {source: together.get(n, n) for n in order for source in reads[n]}
        ends: dict[int, list[int]] = {}
        for source, n in last.items():
            ends.setdefault(n, []).append(source)
        made = {n for n in outputs if n not in self.given}
        room = sum(nodes[n].bytes for n in made)
        received, computed, most = 0, 0, 0
        for n in order:
            if n in made:
                room -= nodes[n].bytes
            elif n in last and n not in self.given:
                if nodes[n].primitive == "sent":
                    received += nodes[n].bytes
                else:
                    computed += nodes[n].bytes
            most = max(most, received + max(0, computed - room))
            for source in ends.get(n, ()):
                if source in made or source in self.given:
                    continue
                if nodes[source].primitive == "sent":
                    received -= nodes[source].bytes
                else:
                    computed -= nodes[source].bytes
        return most

    def kernels(self, outputs: set[int]) -> list[FusedKernel]:
        """What is computed in one go each, and what each reads and writes in memory. Not what is sent."""
        kept, reads = self._fused(outputs)
        return [
            FusedKernel(self.flops.get(n, 0.0), sum(reads[n].values()) + node.bytes)
            for n, node in enumerate(self.nodes)
            if kept[n] and node.primitive not in ("input", "sent")
        ]

    def _fused(self, outputs: set[int]) -> tuple[list[bool], list[dict[int, int]]]:
        """Whether each node's result is in memory, and how many bytes each reads of those that are."""
        nodes = self.nodes
        kept = [node.primitive not in _FUSED for node in nodes]
        for node in nodes:
            if node.primitive in _OPERANDS_IN_MEMORY:
                for read in node.reads:
                    kept[read] = True
        for n in (*outputs, *self.given):
            kept[n] = True
        reads: list[dict[int, int]] = []
        for node in nodes:
            found: dict[int, int] = {}
            for read in node.reads:
                for source, nbytes in {read: nodes[read].bytes}.items() if kept[read] else reads[read].items():
                    found[source] = min(found.get(source, 0) + nbytes, nodes[source].bytes)  # parts are others
            if node.primitive in _PARTS:
                found = {source: min(nbytes, node.bytes) for source, nbytes in found.items()}
            reads.append(found)
        return kept, reads

    def _order(self) -> tuple[list[int], dict[int, int]]:
        """The nodes in the order in which XLA runs them: reductions along the same axes, up to some size, are one
        operation, which comes when the last of them can. And of each of these the last one of its operation."""
        nodes = self.nodes
        order: list[int] = []
        together: dict[int, int] = {}
        waiting: list[int] = []  # what needs one of the reductions that are put off
        open_: dict[tuple[str, ...], list[int]] = {}
        needs: dict[int, frozenset[tuple[str, ...]]] = {}  # of those in `waiting`, and of the reductions

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
                while mine := frozenset().union(*(needs.get(read, frozenset()) for read in node.reads)):
                    close(next(iter(mine)))
                if members and axes in open_ and size > _COMBINED:
                    close(axes)
                open_.setdefault(axes, []).append(n)
                needs[n] = frozenset({axes})
                continue
            mine = frozenset().union(*(needs.get(read, frozenset()) for read in node.reads)) if needs else frozenset()
            if mine:
                needs[n] = mine
                waiting.append(n)
            else:
                order.append(n)
        while open_:
            close(next(iter(open_)))
        return order, together
