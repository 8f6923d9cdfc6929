"""Objects of every kind that a step reads: implemented in C, from the standard library, subclasses of builtins.

The losses are eager PyTorch's, whatever is changed in the objects, and however.
"""

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.compat.python_names import is_python_class
from firstloss.runtime.guards.kind import has_kind, kind_of
from firstloss.runtime.guards.packages import module_of_class
from tests.fuzz.objects import CASES
from tests.fuzz.program_builder import imports

pytestmark = pytest.mark.usefixtures("by_kernels")
STEPS = 7


def losses(case, backend):
    """The losses of a step that reads the case's objects."""
    text = case.function("make")
    names = {}
    exec("\n".join([*imports(text), "import torch", "from torch import nn", text]), names)
    torch.manual_seed(0)
    with backend.device:
        net = nn.Linear(4, 1)
    model, optimizer = fl.compile(net, backend), torch.optim.SGD(net.parameters(), lr=0.001)
    read, events = names["make"]()

    @fl.trace
    def step(x):
        loss = (model(x) ** 2).mean() * read()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    results = []
    for i in range(STEPS):
        if i in (3, 5):
            for event in events[i // 2 - 1 : i // 2]:
                event()
        results.append(step(torch.ones(2, 4)).item())
    for event in events[2:]:
        event()
    return results


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_changes_of_every_kind_of_object_are_detected(case, tmp_path):
    expected = losses(case, fl.backend("CPU"))
    # XLA sums four products in another order than PyTorch, in float32 over seven steps.
    assert losses(case, fl.backend("XLA", artifact_dir=tmp_path)) == pytest.approx(expected, rel=1e-4, nan_ok=True)


# Classes implemented in C whose objects are immutable, besides those that the guards know by name: PyTorch's, those
# used by named tuples and time zones, and the runtime's own.
PLAIN = {"torch", "_collections", "datetime", "zoneinfo", "typing", "pybind11_builtins", "_abc"}
PLAIN |= {"jax", "jaxlib", "firstloss"}


def subclasses(cls, seen):
    for subclass in type.__subclasses__(cls):
        if subclass not in seen:
            seen.add(subclass)
            yield subclass
            yield from subclasses(subclass, seen)


def test_c_classes_are_not_taken_for_plain_ones_by_their_module():
    made_in_c = [cls for cls in subclasses(object, set()) if not is_python_class(cls)]
    plain = [cls for cls in made_in_c if kind_of(cls).is_leaf and not any(map(has_kind, cls.__mro__[:-1]))]
    assert {module_of_class(cls).partition(".")[0] for cls in plain} <= PLAIN
