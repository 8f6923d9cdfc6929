"""Windows of the last results, in lists and deques: the step is compiled once they are full, against eager PyTorch."""

import collections
import itertools

import pytest
import torch
from torch import nn

import firstloss as fl

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning", "ignore:Converting a tensor"),
]

LENGTH, CALLS = 3, 40


def appended(window, value):
    window.append(value)  # a deque drops the first itself
    if isinstance(window, list) and len(window) > LENGTH:
        del window[0]


def prepended(window, value):
    if isinstance(window, list):
        window.insert(0, value)
        del window[LENGTH:]
    else:
        window.appendleft(value)


def rotated(window, value):
    if isinstance(window, list):
        window[:] = [*window[1:], window[0]] if len(window) == LENGTH else window
    else:
        window.rotate(-1)
    if len(window) == LENGTH:
        window[-1] = value
    else:
        window.append(value)


READS = {"mean": lambda w: sum(w) / len(w), "first": lambda w: w[0] * 1.0, "differences": lambda w: w[-1] - w[0]}
CHANGES = {change.__name__: change for change in (appended, prepended, rotated)}
CASES = list(itertools.product(("list", "deque"), ("tensor", "number"), (True, False), CHANGES, READS))


@pytest.mark.parametrize("container, value, is_full, change, read", CASES)
def test_a_window_of_results_is_compiled_once_it_is_full(container, value, is_full, change, read):
    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(3, 2)
        compiled = fl.compile(model, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start = [torch.zeros(()) if value == "tensor" else 0.0 for _ in range(LENGTH if is_full else 0)]
        window = start if container == "list" else collections.deque(start, maxlen=LENGTH)

        @fl.trace
        def step(x):
            optimizer.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            CHANGES[change](window, loss.item() if value == "number" else loss.detach())
            return loss.detach(), READS[read](window)

        results = [[float(r) for r in step(torch.randn(4, 3))] for _ in range(CALLS)]
        return [*results, [float(v) for v in window], *(p.detach().clone() for p in model.parameters())], step

    expected, _ = run(fl.backend("CPU"))
    actual, step = run(fl.backend("XLA"))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)  # float64 sums in another order
    assert step._cache._entries._counts.fitted >= 10  # the last calls
