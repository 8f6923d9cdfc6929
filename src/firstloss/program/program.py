"""A Program: a graph with the names of what goes in and what comes out."""

from __future__ import annotations

from typing import Any

from .graph import Ref, Value, slice_for
from .python_text import PythonText, scope_of


class Program:
    """A captured constructor or step: `inputs` in, `outputs` out, by name; only what the outputs need is in it."""

    def __init__(self, inputs: dict[str, Value], outputs: dict[str, Ref]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.nodes = slice_for((ref.value for ref in outputs.values()), stop=set(inputs.values()))

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        """Python that runs: see `scope`."""
        return str(PythonText(self))

    def scope(self) -> dict[str, Any]:
        """What the free names of the Program's text stand for, constants and random streams:

        exec(str(program), scope := program.scope())
        outputs = scope["program"](*inputs)
        """
        return scope_of(self)
