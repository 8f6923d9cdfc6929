"""A Program: a graph with named inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .graph import Node, Ref, Value, slice_for
from .python_text import PythonText, scope_of


class Program:
    """A captured constructor or step, with inputs and outputs by name; contains only what the outputs depend on.

    Attributes:
        notes: what some outputs are, by name, for readers.
    """

    def __init__(
        self, inputs: dict[str, Value], outputs: dict[str, Ref], notes: Mapping[str, str] | None = None
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.notes: Mapping[str, str] = {} if notes is None else notes
        self.nodes: list[Node] = slice_for((ref.value for ref in outputs.values()), stop=set(inputs.values()))

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        """Executable Python: see `scope`."""
        return str(PythonText(self))

    def scope(self) -> dict[str, Any]:
        """The values of the free names in the Program's text (constants and random streams).

        After `exec(str(program), scope := program.scope())`, `scope["program"]` is a function of the inputs that
        returns the outputs.
        """
        return scope_of(self)
