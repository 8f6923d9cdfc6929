"""What is under way in this process: open `deferred` contexts, and at most one step trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from .generators import Generators
from .program import Node, Value

if TYPE_CHECKING:
    from .tensor import Store


class Tracing:
    """What the recorder needs of a step trace (`step.py`): see there."""

    cbfloat16 = False  # what is float16 in the step is cbfloat16
    latest: Value | None = None  # what the last recorded operation made

    def adopt(self, store: Store) -> None: ...

    def adopt_real(self, tensor: torch.Tensor) -> Store:
        raise NotImplementedError

    def read_real(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def refuse_read(self, op: OpOverload) -> None: ...

    def key_draw(self, node: Node) -> None: ...


trace: Tracing | None = None
reseated = 0  # how often a tensor that lives on a backend was given other memory
depth = 0  # how many `deferred` contexts are open
seedings = 0  # how often torch.manual_seed has been called
generators = Generators()
# Constants met by the contexts that are open: by the tensor's id, the tensor itself, its version and its Value.
constants: dict[int, tuple[torch.Tensor, int, Value]] = {}


def enter(policy: str | None = None) -> None:
    """A `deferred` context opens; random streams follow `policy`, or the one that they follow already."""
    global depth
    generators.policy = policy or generators.policy
    depth += 1


def leave() -> None:
    """A `deferred` context closes: the last one leaves every generator where eager would have."""
    global depth
    depth -= 1
    if not depth:
        constants.clear()
        generators.settle()
        generators.policy = "eager"


def set_trace(new: Any) -> Any:
    """Make `new` (or None) the step trace under way; returns the one before."""
    global trace
    before, trace = trace, new
    return before
