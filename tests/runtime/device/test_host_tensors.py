"""Steps that run by their Python use plain tensors; whatever is done between their calls, it is as eagerly."""

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.capture.tensor import DeferredTensor
from firstloss.runtime.device import host_tensors
from firstloss.runtime.step.untraced_calls import UntracedCalls

pytestmark = [
    pytest.mark.filterwarnings("ignore::firstloss.errors.EagerStepWarning"),
    pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning"),
]

CALLS = 18
BATCHES = [torch.randn(6, 4, generator=torch.Generator().manual_seed(n)) for n in range(CALLS)]
# Traced calls compute the update in another order. Measured: 3e-7
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def backend(tmp_path, monkeypatch):
    only = [threading.current_thread()]  # whatever threads earlier tests have left
    monkeypatch.setattr(threading, "enumerate", lambda: only)
    monkeypatch.setattr(threading, "active_count", lambda: len(only))
    return fl.backend("XLA", artifact_dir=tmp_path)


class Run:
    """A model that is trained by a step which reads a mask, traced or not."""

    def __init__(self, backend, traced, optimizer="AdamW", updates=True):
        torch.manual_seed(0)
        self.traced, self.updates, self.kept, self.seen = traced, updates, [], []
        if traced:
            with backend.device:
                self.model = self.build()
            self.call = fl.compile(self.model, backend)
            self.step, self.evaluate = fl.trace(self._step), fl.trace(self._evaluate)
        else:
            self.model = self.call = self.build()
            self.step, self.evaluate = self._step, self._evaluate
        kinds = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
        self.optimizer = kinds[optimizer](self.model.parameters(), lr=0.05)
        self.plain = 0  # calls after which the weights were plain
        self.graphs = set()  # the calls whose results have a graph

    @staticmethod
    def build():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))
        model[4].weight = nn.Parameter(model[3].weight[:2].detach().clone())
        model.tied = model[3].weight
        model.table = torch.zeros(4, 2)
        model.rows = model.table[1:]
        return model

    def _step(self, x):
        y = self.call(x) + self.model.rows[0]
        loss = y.square().mean() + 0.1 * y[y > 0].sum()
        if self.updates:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def _evaluate(self, x):
        with torch.no_grad():
            return self.call(x).sum()

    def outcome(self, change, graphs=None):
        for n, x in enumerate(BATCHES):
            loss = self.step(x)
            if type(loss) is torch.Tensor and (graphs is None or n in graphs):
                self.graphs.add(n)
            self.plain += type(self.model[3].bias) is nn.Parameter and self.traced
            self.seen.append(loss.detach().clone())
            change(self, n, loss)
        state = self.model.state_dict()
        moments = [v for entry in self.optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
        return [torch.as_tensor(t).detach().clone() for t in (*self.seen, *state.values(), *moments)]


def _edit(run, n, loss):
    with torch.no_grad():
        run.model[0].weight.mul_(0.9)


def _assign_data(run, n, loss):
    if n % 3 == 0:
        run.model[0].weight.data = run.model[0].weight.data * 0.9


def _edit_data(run, n, loss):
    run.model[3].weight.data.mul_(0.9)


def _load(run, n, loss):
    if n == 6:
        run.kept = copy.deepcopy(run.model.state_dict())
    if n == 9:
        run.model.load_state_dict(run.kept)


def _keep_state_dict(run, n, loss):
    if n == 0:
        run.kept = run.model.state_dict()
    run.seen += [t.clone().float() for t in run.kept.values()]


def _keep_view(run, n, loss):
    if n in (0, 8):
        run.kept.append(run.model[3].weight.detach().view(-1))
    for view in run.kept:
        view.mul_(0.99)
    run.seen += [view.sum() for view in run.kept]


def _keep_array(run, n, loss):
    if n in (1, 9):
        run.kept.append(run.model[3].weight.detach().numpy())
    for array in run.kept:
        array *= 0.99
    run.seen += [torch.tensor(array.sum()) for array in run.kept]


def _evaluate(run, n, loss):
    if n % 4 == 3:
        run.seen.append(run.evaluate(BATCHES[0]))


def _freeze(run, n, loss):
    run.model[0].weight.requires_grad_(not 6 < n < 13)


def _replace(run, n, loss):
    if n in (6, 10):
        run.model[4] = nn.Linear(8, 2)


def _resize(run, n, loss):
    if n == 6:
        run.optimizer.state.clear()
        run.model.double().float()


def _deepcopy(run, n, loss):
    if n in (2, 7):
        other = copy.deepcopy(run.model)
        run.seen.append(other(BATCHES[0]).sum())


def _views_in_copies(run, n, loss):
    """A tensor and a view of it share memory in a copy, too."""
    if n in (3, 9):
        other = copy.deepcopy(run.model)
        other.table.fill_(n)  # of the copy only
        run.seen += [other.rows.sum(), run.model.rows.sum()]


def _save(run, n, loss):
    if n in (2, 7):
        file = io.BytesIO()
        torch.save(run.model.state_dict(), file)
        file.seek(0)
        run.seen += [t.float() for t in torch.load(file).values()]


def _swap(run, n, loss):
    if n == 7:
        new = nn.Parameter(run.model[3].weight.detach() * 0.5)
        torch.utils.swap_tensors(run.model[3].weight, new)


def _halve(weight):
    weight.grad.mul_(0.5)


def _hooks(run, n, loss):
    if n in (0, 7):
        run.model[0].weight.register_hook(lambda g: g * 0.5)
        run.model[3].weight.register_post_accumulate_grad_hook(_halve)


def _optimizer_state(run, n, loss):
    if n in (3, 7):
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    for entry in run.optimizer.state.values():
        entry["exp_avg"].mul_(0.9)


def _pass_weight(run, n, loss):
    if n % 5 == 4:
        step = fl.trace(_norm) if run.traced else _norm
        run.seen.append(step(run.model[3].weight))


def _norm(weight):
    return weight.detach().square().sum()


def _train(run, n, loss):
    run.model.train(n % 5 != 3)


def _with_grad(run, n, loss):
    run.model[0].weight.grad = torch.ones_like(run.model[0].weight)


def _keep_gradients(run, n, loss):
    """The optimizer's state, or another tensor, has what is a gradient as well."""
    if n == 0:
        run.optimizer.zero_grad = lambda: None
    for weight in run.model.parameters():
        run.seen.append(torch.tensor(float(run.optimizer.state[weight].get("last") is weight.grad)))
        run.optimizer.state[weight]["last"] = weight.grad
        if n > 0:
            weight.grad.zero_()


CHANGES = {
    name.removeprefix("_").replace("_", " "): change
    for name, change in list(globals().items())
    if name.startswith("_") and getattr(change, "__code__", None) is not None and change.__code__.co_argcount == 3
}


def _same(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one.double(), other.double(), **CLOSE)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_calls(backend, change):
    expected = Run(backend, False).outcome(change)
    run = Run(backend, True)
    _same(run.outcome(change), expected)
    assert run.plain >= 2


def test_a_view_of_before_its_base_required_a_gradient(backend):
    """It requires one since then, and no graph ends in it."""
    run = Run(backend, True, updates=False)
    weight = run.model[3].weight
    weight.requires_grad_(False)
    x = torch.ones(2, weight.shape[1], requires_grad=True)
    view = weight.t()
    graph = x.mm(view).sum()
    weight.requires_grad_(True)
    expected = weight.detach().sum(0).expand(2, -1).clone()
    run.outcome(lambda run, n, loss: None)
    assert run.plain >= 2 and view.requires_grad
    graph.backward()
    torch.testing.assert_close(x.grad, expected, **CLOSE)


MOVES = {
    "edited by NumPy": lambda tensor: tensor.numpy().__setitem__(1, 3.0),
    "resized": lambda tensor: tensor.resize_(2, 2).zero_().resize_(3),
    "grown": lambda tensor: tensor.resize_(5).fill_(2.0),
    "set": lambda tensor: tensor.set_(torch.ones(3)),
    "another's memory": lambda tensor: setattr(tensor, "data", torch.arange(3.0)),
    "swapped": lambda tensor: torch.utils.swap_tensors(tensor, torch.ones(3)),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_tensor_of_the_step_leaves_its_memory_between_calls(move, tmp_path):
    def totals(backend, at):
        torch.manual_seed(0)
        model = fl.compile(nn.Linear(4, 3), backend)
        held, seen, found = [torch.zeros(3)], [], []

        @fl.trace
        def step(x):
            out = model(x)
            with torch.no_grad():
                held[0][0] += 1.0
            seen.append(out.tolist())  # read: its Python runs
            return out.mean() + held[0].sum()

        for call in range(8):
            if call == at:
                move(held[0])
            found.append(step(BATCHES[call]).item())
        return torch.tensor(found), torch.tensor(seen), held[0]

    for at in range(8):
        expected = totals(fl.backend("CPU"), at)
        for one, other in zip(totals(fl.backend("XLA", artifact_dir=tmp_path), at), expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, **CLOSE)


def test_weights_are_plain_until_another_step_is_compiled(backend):
    run = Run(backend, True)
    weight, storage = run.model[0].weight, run.model[0].weight._storage
    kinds = []
    for _ in range(12):
        run.step(BATCHES[0])
        kinds.append(type(weight))
    assert kinds[-3:] == [nn.Parameter] * 3 and run.model[0].weight is weight
    assert type(run.optimizer.state[weight]["exp_avg"]) is torch.Tensor
    run.evaluate(BATCHES[0])
    assert type(weight) is DeferredTensor and weight._storage is storage
    assert type(run.optimizer.state[weight]["exp_avg"]) is DeferredTensor


def test_losses_that_are_kept_do_not_make_later_calls_slower(backend, monkeypatch):
    """Their graphs hold each weight as it was at their call, which is not exchanged again."""
    run, exchanged = Run(backend, True), []
    original = host_tensors._become_plain
    monkeypatch.setattr(host_tensors, "_become_plain", lambda *args: exchanged.append(args[0]) or original(*args))
    counts = []
    for n in range(16):
        begin = len(exchanged)
        for _ in range(2):
            run.kept.append(run.step(BATCHES[n]))
        run.evaluate(BATCHES[n])
        counts.append(len(exchanged) - begin)
        assert all(len(p._storage.alive()) < 4 for p in run.model.parameters()), counts
    assert counts[-1] == counts[-5] > 0


def _backward_outside(run, n, loss):
    if n not in run.graphs:
        return
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def _backward_later(run, n, loss):
    run.kept += [loss] if n in run.graphs else []
    if n % 3 == 2:
        for kept in run.kept:
            kept.backward()
        run.kept.clear()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)


def _backward_much_later(run, n, loss):
    run.kept += [loss] if n in run.graphs else []
    if n == CALLS - 1:
        torch.stack(run.kept).sum().backward()
        run.seen += [p.grad for p in run.model.parameters()]


def _backward_much_later_with_hooks(run, n, loss):
    if n == 0:
        run.model[0].weight.register_hook(lambda g: g * 0.5)
        run.model[3].weight.register_post_accumulate_grad_hook(_halve)
    _backward_much_later(run, n, loss)


LATER = [_backward_outside, _backward_later, _backward_much_later, _backward_much_later_with_hooks]


@pytest.mark.parametrize("change", LATER)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_gradients_of_losses_of_earlier_calls(backend, change, optimizer):
    run = Run(backend, True, optimizer, updates=False)
    got = run.outcome(change)
    eager = Run(backend, False, optimizer, updates=False)
    _same(got, eager.outcome(change, run.graphs))
    assert run.plain >= 2


@pytest.mark.parametrize("keeps_graph", [True, False])
@pytest.mark.parametrize("hooked", ["weight", "bias", "none"])
def test_gradients_that_are_accumulated_stay_the_same_objects(backend, hooked, keeps_graph, monkeypatch):
    """A weight with a hook stays deferred while a graph of an earlier call is alive, and its gradient does not."""
    monkeypatch.setattr(host_tensors, "_STEPS", 0)
    monkeypatch.setattr(UntracedCalls, "begin", UntracedCalls.begin_at_once)
    with backend.device:
        model = nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 2))
    call, kinds = fl.compile(model, backend), set()

    @fl.trace
    def step(x):
        y = call(x)
        (y.square().mean() + 0.1 * y[y > 0].sum()).backward()
        return y if keeps_graph else y.detach()

    for n, x in enumerate(BATCHES):
        before = [p.grad for p in model.parameters()]
        if hooked != "none":
            getattr(model[2], hooked).register_hook(lambda grad: grad * 0.5)
        kept = step(x)  # noqa: F841 - its graph
        assert n == 0 or all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True)), n
        kinds.add(type(model[2].bias.grad))
    assert kinds == {torch.Tensor, DeferredTensor}


def test_a_model_is_freed_while_its_weights_are_plain(backend):
    run = Run(backend, True)
    for _ in range(7):
        run.step(BATCHES[0])
    weight = run.model[0].weight
    assert type(weight) is nn.Parameter
    ref, memory = weakref.ref(weight), weakref.ref(host_tensors._plain[0].storage)
    del run.model, run.call, run.optimizer, run.step, run.evaluate, weight

    gc.collect()
    assert ref() is None and memory() is None


def _compute_until(done):
    while not done.is_set():
        sum(range(100_000))


@pytest.mark.parametrize("thread_waits", [True, False])
def test_weights_stay_deferred_while_other_threads_compute(backend, thread_waits, monkeypatch):
    """They may use the weights; but not the threads of progress bars and writers, which wait."""
    run, done = Run(backend, True), threading.Event()
    thread = threading.Thread(target=done.wait if thread_waits else lambda: _compute_until(done))
    thread.start()
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), thread])
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    try:
        got = run.outcome(lambda *_: None)
    finally:
        done.set()
        thread.join()
    assert run.plain >= 2 if thread_waits else run.plain == 0
    _same(got, Run(backend, False).outcome(lambda *_: None))


def test_a_compiled_step_in_another_thread_meanwhile(backend):
    """It sees the weights as they are, and does not exchange them under the step that runs."""
    run = Run(backend, True)
    for _ in range(7):
        run.step(BATCHES[0])
    expected = run._evaluate(BATCHES[0]).item()
    host_tensors._running.add(0)  # another thread's step
    try:
        assert run.evaluate(BATCHES[0]).item() == pytest.approx(expected, rel=1e-5)
        assert type(run.model[0].weight) is nn.Parameter
    finally:
        host_tensors._running.discard(0)
