"""Closures run after the step, with values, in order, and no later than documented."""

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.runtime.step import loop as loops


@pytest.fixture
def model(backend):
    torch.manual_seed(0)
    with backend.device:
        return nn.Linear(2, 1)


def batches(count):
    return [torch.full((1, 2), float(i)) for i in range(1, count + 1)]


def trained(model, closure, backend):
    """A step that calls `closure` on its loss, and one that does the same eagerly; both return the loss."""
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @fl.trace
    def step(x):
        loss = compiled(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        closure(loss)
        return loss

    return step


def test_a_closure_runs_after_every_execution(backend, model):
    seen = []
    step = trained(model, fl.step_closure(lambda loss: seen.append(loss)), backend)
    losses = [step(x).item() for x in batches(5)]
    assert [value.item() for value in seen] == losses
    assert len(set(losses)) == 5
    assert all(type(value) is torch.Tensor for value in seen)


def test_all_closures_have_run_when_a_loop_ends(backend, model):
    seen, losses = [], []

    @fl.step_closure
    def note(loss):
        seen.append((fl.current_executor().step, loss.item()))

    step = trained(model, note, backend)
    for x in fl.utils.data.DataExecutor(batches(6)):
        losses.append(step(x))
    assert seen == [(i, loss.item()) for i, loss in enumerate(losses, 1)]
    assert fl.current_executor() is None


def test_a_closure_outside_of_the_step_sees_the_values_at_its_call(backend, model):
    seen, expected = [], []
    step = trained(model, fl.step_closure(lambda loss: None), backend)

    @fl.step_closure
    def note(i, loss, *, weight, row):
        seen.append((i, loss.item(), weight.tolist(), row.tolist()))

    for i, x in enumerate(fl.utils.data.DataExecutor(batches(5))):
        loss = step(x)
        note(i, loss, weight=model.weight, row=model.weight[0, 1:])
        weight = model.weight.tolist()
        expected.append((i, loss.item(), weight, weight[0][1:]))
    assert seen == expected


def test_a_closure_gets_its_arguments_as_of_its_call(backend, model):
    seen = []
    compiled = fl.compile(model, backend)
    outside = torch.ones(2)

    @fl.step_closure
    def note(*values, **more):
        seen.append([v.tolist() if isinstance(v, torch.Tensor) else v for v in (*values, *more.values())])

    @fl.trace
    def step(x):
        with torch.no_grad():
            note(compiled.weight[0], outside, (x, "a"), flag=True)
            compiled.weight.add_(1)
            note(compiled.weight.t()[1])
        return x.sum()

    before = model.weight.tolist()[0]
    step(torch.zeros(1))
    outside.add_(1)
    step(torch.zeros(1))
    one = torch.tensor(before) + 1
    assert seen[0] == [before, [1.0, 1.0], (seen[0][2]), True] and seen[0][2][1] == "a"
    assert seen[1] == [one.tolist()[1]] or seen[1] == [[one.tolist()[1]]]
    assert seen[2][:2] == [one.tolist(), [2.0, 2.0]]


def test_a_closure_may_edit_what_it_gets(backend, model):
    step = trained(model, fl.step_closure(lambda loss: loss.zero_()), backend)
    assert step(batches(1)[0]).item() != 0


def test_python_runs_ahead_by_at_most_the_promised_number_of_steps():
    class Array:
        def __init__(self):
            self.there = False

        def is_ready(self):
            return self.there

        def is_deleted(self):
            return False

        def block_until_ready(self):
            self.there = True

        copy_to_host_async = block_until_ready

    class Everything:
        is_activation_step = is_checkpoint_step = True

    ran, arrays = [], []
    with loops.running(loops.Loop(Everything())) as loop:
        for step in range(1, 8):
            loop.begin(step)
            array = Array()
            arrays.append(array)
            loop.when_ready([array], lambda step=step: ran.append((step, loop.step)))
            loop.dispatched([array])
            assert len(ran) == max(0, step - loops.AHEAD)
        arrays[5].there = True  # the next one, 6, is ready but not the oldest
        assert len(ran) == 5
    assert ran == [(i, i) for i in range(1, 8)]


def test_activation_steps_and_checkpoint_steps_are_respected(backend, model):
    seen, kept, texts = [], [], []

    @fl.step_closure
    def note(loss):
        seen.append(fl.current_executor().step)

    @fl.checkpoint_closure
    def keep(weight):
        kept.append((fl.current_executor().step, weight.tolist(), model.weight.tolist()))

    step = trained(model, note, backend)
    for x in fl.utils.data.DataExecutor(batches(7), activation_steps=3, checkpoint_steps=2):
        step(x)
        keep(model.weight)
        fl.step_closure(texts.append)("text")
    assert seen == [3, 6, 7]
    assert [k[0] for k in kept] == [2, 4, 6, 7]
    assert all(scheduled == read for _, scheduled, read in kept)  # no later step has run
    assert len(texts) == 3


def test_checkpoint_closures_read_the_weights_after_the_step(backend, model):
    kept = []

    @fl.checkpoint_closure
    def keep():
        kept.append(model.weight.tolist())

    compiled = fl.compile(model, backend)

    @fl.trace
    def step(x):
        with torch.no_grad():
            compiled.weight.fill_(0).add_(x.sum())
        keep()
        return x.sum()

    for x in fl.utils.data.DataExecutor(batches(4), checkpoint_steps=2):
        step(x)
    assert kept == [[[4.0, 4.0]], [[8.0, 8.0]]]


def test_a_checkpoint_closure_outside_of_a_loop_is_refused(backend):
    @fl.checkpoint_closure
    def keep():
        pass

    with pytest.raises(fl.errors.ClosureError, match=r"test_closures.py:\d+: .*keep.*DataExecutor"):
        keep()


def test_a_closures_error_is_raised_from_the_loop_with_its_step(backend, model):
    @fl.step_closure
    def check(loss):
        if fl.current_executor().step == 3:
            raise ValueError("the third")

    step = trained(model, check, backend)
    reached = 0
    with pytest.raises(ValueError, match="the third") as caught:
        for x in fl.utils.data.DataExecutor(batches(20)):
            step(x)
            reached += 1
    assert "after step 3" in caught.value.__notes__[0] and "test_closures.py" in caught.value.__notes__[0]
    assert reached <= 3 + loops.AHEAD
    assert fl.current_executor() is None


def test_leaving_the_loop_runs_pending_closures(backend, model):
    seen = []
    step = trained(model, fl.step_closure(lambda loss: seen.append(1)), backend)
    for i, x in enumerate(fl.utils.data.DataExecutor(batches(9)), 1):
        step(x)
        if i == 4:
            break
    assert len(seen) == 4
    with pytest.raises(ZeroDivisionError):
        for x in fl.utils.data.DataExecutor(batches(9)):
            step(x)
            1 / 0  # noqa: B018
    assert len(seen) == 5


def test_loops_can_be_nested(backend, model):
    order = []
    compiled = fl.compile(model, backend)

    @fl.step_closure
    def note(name):
        order.append((name, fl.current_executor().step))

    @fl.trace
    def train(x):
        note("train")
        return compiled(x).sum()

    @fl.trace
    def validate(x):
        note("validate")
        return compiled(x).sum()

    outer = fl.utils.data.DataExecutor(batches(2))
    for x in outer:
        train(x)
        for y in fl.utils.data.DataExecutor(batches(2)):
            validate(y)
        assert fl.current_executor() is outer
    assert order == [("train", 1), ("validate", 1), ("validate", 2), ("train", 2), ("validate", 1), ("validate", 2)]


def test_a_closure_can_be_a_method_and_call_another(backend):
    class Metrics:
        def __init__(self):
            self.seen = []

        @fl.step_closure
        def note(self, value):
            self.again(value)

        @fl.step_closure
        def again(self, value):
            self.seen.append(value.item())

    metrics = Metrics()

    @fl.trace
    def step(x):
        metrics.note(x.sum())

    for x in fl.utils.data.DataExecutor(batches(3)):
        step(x)
    assert metrics.seen == [2.0, 4.0, 6.0]


def test_on_the_cpu_backend_closures_run_at_once():
    fl.backend("CPU")
    seen = []

    @fl.step_closure
    def note(x):
        seen.append(x.sum().item())

    @fl.trace
    def step(x):
        note(x)
        return len(seen)

    assert step(torch.ones(2)) == 1
    assert [step(x) for x in fl.utils.data.DataExecutor(batches(3), activation_steps=2)] == [1, 2, 3]
    assert seen == [2.0, 4.0, 6.0]
