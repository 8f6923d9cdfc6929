"""Two Programs are equivalent only if one executable does for both, which takes its inputs by position."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from firstloss.program.compare import first_difference
from firstloss.program.graph import Node, Ref, Value
from firstloss.program.program import Program
from firstloss.program.source import Source

aten = torch.ops.aten
OPERATIONS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


def scalar(**fields):
    return Value((), (), torch.float64, torch.device("cpu"), **fields)


def program(seed, order):
    """A Program of scalars, listed in this order; what it computes of them by name depends on the seed."""
    rng = random.Random(seed)
    values = [scalar(label=f"x{i}") for i in range(len(order))]
    inputs = {f"x{i}": values[i] for i in order}
    for index in range(rng.randint(1, 8)):
        operands = tuple(Ref.of(rng.choice(values)) for _ in range(2))
        node = Node(index, rng.choice(OPERATIONS), operands, {}, (), False, None, Source("made_up.py", index))
        node.outputs = (scalar(node=node),)
        values.append(node.outputs[0])
    return Program(inputs, {"out": Ref.of(values[-1])})


def executed(one, numbers):
    exec(str(one), scope := one.scope())
    return scope["program"](*(torch.tensor(number, dtype=torch.float64) for number in numbers))["out"]


@given(st.integers(0, 10_000), st.permutations(range(4)))
def test_equivalent_programs_compute_the_same_of_inputs_by_position(seed, order):
    one, other = program(seed, range(4)), program(seed, order)
    numbers = [0.3, 1.7, -2.1, 5.9]
    if first_difference(one, other) is None:
        torch.testing.assert_close(executed(one, numbers), executed(other, numbers), rtol=0, atol=0, equal_nan=True)
    assert first_difference(one, program(seed, range(4))) is None
