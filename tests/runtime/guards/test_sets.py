"""What a step takes from a set, and the order that it leaves, are eager PyTorch's, whatever the set's history."""

import gc
import itertools
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import firstloss as fl
from firstloss.runtime.guards.set_tables import SetTable, can_read_tables
from tests.compiled_steps import latest

pytestmark = pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
CALLS = 4


def popped_until(container, length):
    while len(container) > length:
        container.pop()
    return container


def without(container, items):
    container.difference_update(items)
    return container


MORE = [f"more {i}" for i in range(200)]
# How a set of these items has come to be: its table's size, and what was removed from it, decide its order.
HISTORIES = {
    "of a list": lambda items: set(items),
    "copied": lambda items: set(items).copy(),
    "shrunk": lambda items: without({*items, *MORE}, MORE),
    "popped": lambda items: popped_until({*MORE[:60], *items}, 12),
}
ITEMS = {"numbers": [*range(10)], "texts": [f"item {i}" for i in range(10)]}


def take(s, seen):
    seen.append(s.pop())


def take_and_add_another(s, seen):
    seen.append(s.pop())
    s.add((seen[-1], len(seen)))


def take_and_put_back(s, seen):
    seen.append(s.pop())
    s.add(seen[-1])


def remove_first(s, seen):
    seen.append(list(s))
    s.discard(seen[-1][0])


def refill(s, seen):
    s.clear()
    s.update(["a", "b", "c"])
    seen.append(list(s))


def keep_another(s, seen):
    seen.append({item for item in s if item != next(iter(s))})
    seen[-1].pop()


EDITS = [take, take_and_add_another, take_and_put_back, remove_first, refill, keep_another]


def seed(counter):
    random.seed(1)


def count(counter):
    counter["n"] += 1


# What makes a step be traced twice at a call: the first trace is undone.
ALSO = [seed, count]


def run(backend, history, items, edit, also):
    with backend.device:
        model = torch.nn.Linear(3, 3)
    compiled = fl.compile(model, backend)
    container, seen, counter = HISTORIES[history](ITEMS[items]), [], {"n": 0}

    @fl.trace
    def step(x):
        edit(container, seen)
        also(counter)
        return compiled(x).sum() * 0 + counter["n"]

    results = []
    for call in range(CALLS):
        random.seed(call)
        results.append(step(torch.ones(2, 3)).item())
    rest = []
    while container:
        rest.append(container.pop())
    return results, [list(one) if isinstance(one, set) else one for one in seen], rest


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_a_step_that_changes_a_set(edit, tmp_path):
    for history, items, also in itertools.product(HISTORIES, ITEMS, ALSO):
        eager = run(fl.backend("CPU"), history, items, edit, also)
        traced = run(fl.backend("XLA", artifact_dir=tmp_path), history, items, edit, also)
        assert traced == eager, (history, items, also.__name__)


def test_one_that_leaves_a_set_as_it_was_is_not_traced_again(tmp_path):
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    with backend.device:
        model = torch.nn.Linear(3, 3)
    compiled, container = fl.compile(model, backend), {"x", "y"}

    @fl.trace(check=False)
    def step(x):
        container.clear()
        container.update(["a", "b"])
        return compiled(x).sum()

    for _ in range(6):
        step(torch.ones(2, 3))
    traced = latest(step).traced
    step(torch.ones(2, 3))
    assert latest(step).traced is traced and sorted(container) == ["a", "b"]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "discard"]), st.one_of(st.integers(0, 60), st.text("ab", max_size=4))),
        st.just(("pop", None)),
        st.just(("copy", None)),
    ),
    max_size=120,
)


def edited(container, operations):
    for name, item in operations:
        if name == "pop":
            if container:
                container.pop()
        elif name == "copy":
            container = container.copy()
        else:
            getattr(container, name)(item)
    return container


@given(OPERATIONS, OPERATIONS)
@settings(max_examples=200, deadline=None)
def test_a_table_restores_any_set(history, edits):
    assert can_read_tables()
    container, twin = edited(set(), history), edited(set(), history)
    table = SetTable(container)
    for name, item in edits:
        if name != "copy":
            edited(container, [(name, item)])
    table.restore(container)
    assert SetTable(container).order() == SetTable(twin).order() == table.order()
    container.add("one more")
    twin.add("one more")
    assert [container.pop() for _ in range(len(twin))] == [twin.pop() for _ in range(len(twin))]


def test_a_restored_set_owns_its_items():
    class Item:
        pass

    item = Item()
    container, dead = {item, *range(100)}, weakref.ref(item)
    for _ in range(3):
        table = SetTable(container)
        container.clear()
        table.restore(container)
    del item, table
    gc.collect()
    assert dead() in container
    container.clear()
    assert dead() is None
