"""Objects as dict keys and items of large collections keep their identity, and their contents are guarded."""

from __future__ import annotations

import collections
import weakref

import pytest
import torch
from torch import nn

import firstloss as fl

pytestmark = pytest.mark.usefixtures("by_kernels")


class Setting:
    def __init__(self, value: float) -> None:
        self.value = value


def _setting(keys: dict) -> object:
    return next(key for key in keys if isinstance(key, Setting))


MAKE = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": lambda entries: collections.defaultdict(float, entries),
    "WeakKeyDictionary": lambda entries: weakref.WeakKeyDictionary(  # compares tensors for equality
        {key: value for key, value in entries.items() if isinstance(key, (Setting, nn.Module))}
    ),
}
CHANGE = {
    "a weight": lambda table, m, loss: table.__setitem__(m.weight, loss),
    "a module": lambda table, m, loss: table.__setitem__(m, loss),
    "one that is there": lambda table, m, loss: table.__setitem__(_setting(table), loss),
    "one less": lambda table, m, loss: table.pop(m.bias, None),
}


@pytest.mark.parametrize("size", [0, 1100], ids=["small", "large"])
@pytest.mark.parametrize("change", CHANGE)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning", "ignore::UserWarning")
def test_keys_keep_their_identity_and_contents_are_guarded(kind: str, change: str, size: int, tmp_path) -> None:
    if kind == "WeakKeyDictionary" and change in ("a weight", "one less"):
        pytest.skip("a weak dictionary asks tensors whether they are equal: eager PyTorch raises")
    seen = {}
    for name in ("CPU", "XLA"):
        torch.manual_seed(0)
        backend = fl.backend(name) if name == "CPU" else fl.backend(name, artifact_dir=tmp_path)
        with backend.device:
            model = nn.Linear(3, 2)
        compiled = fl.compile(model, backend)
        references = [
            Setting(0.5),
            nn.Linear(2, 2),
            torch.ones(1),
            torch.ones(2),
            torch.zeros(1),
            torch.ones(1),
            model.bias,
        ]
        many: list = [torch.ones(1) if i % 2 else Setting(float(i)) for i in range(size)]
        entries = {key: float(i) for i, key in enumerate([*references, *many])}
        entries |= {(references[0], 1): 9.0, frozenset([references[1]]): 8.0, "plain": 7.0}
        table = MAKE[kind](entries)
        before = list(table)

        @fl.trace
        def step(x, model=model, compiled=compiled, table=table):
            loss = compiled(x).sum() * sum(key.value for key in list(table)[:3] if isinstance(key, Setting))
            CHANGE[change](table, model, loss.detach())
            return loss

        losses = []
        for i in range(5):
            if i == 3:
                references[0].value = 2.0
            losses.append(step(torch.ones(2, 3)).item())
        now = list(table)
        left = [key for key in before if not (change == "one less" and key is model.bias)]
        assert len(now) == len(left) + (change in ("a weight", "a module"))
        assert all(a is b for a, b in zip(left, now, strict=False))
        seen[name] = losses, [float(value) for value in table.values()]
    # Two sums of six products, perhaps in another order, here and below.
    torch.testing.assert_close(torch.tensor(seen["CPU"][0]), torch.tensor(seen["XLA"][0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.tensor(seen["CPU"][1]), torch.tensor(seen["XLA"][1]), rtol=1e-6, atol=0)
    assert seen["XLA"][0][2] != seen["XLA"][0][3]


def test_an_equal_tensor_is_another_key(tmp_path) -> None:
    seen = {}
    for name in ("CPU", "XLA"):
        torch.manual_seed(0)
        backend = fl.backend(name) if name == "CPU" else fl.backend(name, artifact_dir=tmp_path)
        with backend.device:
            model = nn.Linear(3, 2)
        compiled = fl.compile(model, backend)
        first, second = torch.ones(1), torch.ones(1)
        table = {first: 1.0}

        @fl.trace
        def step(x, compiled=compiled, table=table, first=first):
            return compiled(x).sum() * (2.0 if first in table else 3.0)

        losses = []
        for i in range(4):
            if i == 2:
                table.pop(first)
                table[second] = 1.0
            losses.append(step(torch.ones(2, 3)).item())
        seen[name] = losses
    torch.testing.assert_close(torch.tensor(seen["CPU"]), torch.tensor(seen["XLA"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("one", [1, 1.0, torch.ones(())], ids=["int", "float", "tensor"])
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning", "ignore::UserWarning")
def test_an_equal_item_of_a_large_list_is_detected(one, tmp_path) -> None:
    """`1 == True == 1.0`, and one-element tensors compare equal too."""
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    with backend.device:
        model = nn.Linear(3, 2)
    compiled = fl.compile(model, backend)
    items: list = [one] * 2000

    @fl.trace
    def step(x):
        return compiled(x).sum(), 1.0 if type(items[7]) is bool else 2.0

    step(torch.ones(2, 3))
    assert step(torch.ones(2, 3))[1] == 2.0
    items[7] = True
    assert step(torch.ones(2, 3))[1] == 1.0
