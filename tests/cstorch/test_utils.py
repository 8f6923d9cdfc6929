"""What `cerebras.pytorch.utils` and `.nn` have that PyTorch does not."""

import random
import time

import pytest
import torch

import firstloss.cstorch as cstorch
from firstloss.cstorch.utils import nest, tools, tracker
from firstloss.errors import ExecutorError, LoaderError

Schedule, Range = cstorch.utils.data.Schedule, cstorch.utils.data.Schedule.Range


# -- nested data --


def test_leaves_are_visited_with_their_paths():
    data = {"a": [torch.ones(1), (torch.ones(2), "text")], 3: torch.ones(3)}
    visited = {".".join(path): len(tensor) for path, tensor in nest.visit_torch_tensors(data)}
    assert visited == {"a.0": 1, "a.1.0": 2, "3": 3}
    assert next(nest.visit_torch_tensors(data, scope=["it"]))[0] == ["it", "a", "0"]
    with pytest.raises(ValueError, match=r"a\.1\.1 is of type str"):
        list(nest.visit_torch_tensors(data, strict=True))
    assert len(list(nest.visit_device_tensors(data, "cpu"))) == 3 and not list(nest.visit_device_tensors(data, "cuda"))


def test_structures_are_mapped():
    data = {"a": [torch.ones(1), 5], "b": (torch.ones(2),)}
    paths = []
    mapped = nest.map_torch_tensors(lambda path, tensor: paths.append(path) or tensor * 2, data, scope=["it"])
    assert paths == [["it", "a", "0"], ["it", "b", "0"]] and mapped["a"][1] == 5 and mapped["b"][0].sum() == 4


def test_classes_can_be_registered():
    class Pair:
        def __init__(self, left, right):
            self.left, self.right = left, right

    @nest.register_visit_fn(Pair)
    def visit_pair(pair):
        yield ["left"], pair.left
        yield ["right"], pair.right

    try:
        assert [path for path, _ in nest.visit_torch_tensors([Pair(torch.ones(1), 2)])] == [["0", "left"]]
    finally:
        nest.unregister_visit_fn(Pair)
    assert not list(nest.visit_torch_tensors([Pair(torch.ones(1), 2)]))


def test_differences_are_described():
    one, other = {"a": torch.ones(2), "b": 1, "c": 2}, {"a": torch.ones(2), "b": 3, "d": 2}
    assert list(nest.diff(one, other)) == ["b: 1 and 3", "c: only in the first", "d: only in the second"]
    assert not list(nest.diff(one, one))


# -- loops --


def test_a_schedule_has_the_steps_of_its_intervals():
    rng = random.Random(0)
    for _ in range(200):
        start = rng.randrange(5)
        interval = Range(start, start + 1 + rng.randrange(9), 1 + rng.randrange(4), rng.random() < 0.5)
        steps = list(interval)
        assert steps == [step for step in range(30) if interval.match(step)] and len(interval) == len(steps)
        assert interval.final_step == steps[-1]
        for target in range(steps[-1] + 1):
            assert interval.next_immediate_step(target) == next(step for step in steps if step >= target)
    both = Schedule([Range(0, 4, 2), Range(6, 9, 3, True)])
    assert list(both) == [0, 2, 6, 8] and both.start == 0 and both.final_step == 8 and len(both) == 4
    assert both.next_immediate_step(3) == 6 and both.match(8) and not both.match(7)
    assert Schedule([]).start is None and Schedule([]).next_immediate_step(1) is None
    for wrong in (lambda: Range(3, 3), lambda: Schedule([Range(0, 4), Range(3, 5)])):
        with pytest.raises(ExecutorError):
            wrong()


def test_an_executor_counts_samples_and_saves_by_a_schedule():
    cstorch.backend("CPU")
    saved, states = [], []

    @cstorch.checkpoint_closure
    def save(step):
        saved.append(step)
        states.append(cstorch.distributed.get_worker_state())

    executor = cstorch.utils.data.DataExecutor(
        [torch.ones(4, 2)] * 6, checkpoint_steps=Schedule([Range(1, 6, 2, True)])
    )
    for step, _ in enumerate(executor):
        save(step)
    assert saved == [1, 3, 5] and executor.profiler.rate_tracker.total_samples == executor.samples == 24
    assert [(s.appliance_step, s.samples_streamed, s.total_num_workers) for s in states][:1] == [(2, 8, 1)]
    assert executor.profiler.rate_tracker.global_rate > 0
    with pytest.raises(AttributeError, match="no activity 'nothing'"):
        _ = executor.profiler.nothing
    with pytest.raises(LoaderError, match="needs a running loop"):
        cstorch.distributed.get_worker_state()


def test_rates_are_smoothed(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    rates = tracker.RateTracker(smooth_factor=0.25)
    rates.add(8)
    now[0] += 2
    assert rates.rate() == 4 and rates.total_count == 8
    rates.add(12)
    now[0] += 1
    assert rates.rate() == 0.25 * 12 + 0.75 * 4 and rates.global_rate() == 20 / 3 and rates.elapsed_seconds() == 3
    assert rates.rate() == 0.0  # no time has passed
    rates.reset()
    assert rates.total_count == 0


# -- the sampler --


def test_a_sampler_shuffles_alike_and_goes_on_where_it_was():
    make = cstorch.utils.data.DistributedSampler
    data = range(10)
    first = make(data, seed=3, batch_size=4)
    epochs = [list(first), list(first)]
    assert all(len(epoch) == 2 for epoch in epochs) and epochs[0] != epochs[1] and len(first) == 2
    assert list(make(data, seed=3, batch_size=4)) == epochs[0]
    generator = torch.Generator().manual_seed(3)
    assert sum(epochs[0], []) == torch.randperm(10, generator=generator)[:8].tolist()
    assert list(make(data, seed=3, start_index=10, batch_size=4)) == epochs[1]
    resumed = make(data, seed=3, batch_size=4)
    resumed.set_state(4)
    assert list(resumed)[0] == epochs[0][1]


def test_a_sampler_fills_or_drops_the_last_batch():
    make = cstorch.utils.data.DistributedSampler
    assert list(make(range(5), shuffle=False, batch_size=2)) == [[0, 1], [2, 3]]
    assert list(make(range(5), shuffle=False, batch_size=2, drop_last=False)) == [[0, 1], [2, 3], [4]]
    assert list(make(range(5), shuffle=False, batch_size=2, drop_last=False, pad_last=True))[-1] == [4, 0]
    assert list(make(range(3), shuffle=False, num_samples=7)) == [0, 1, 2, 0, 1, 2, 0]
    assert sorted(make(range(3), seed=1, num_samples=7))[:2] == [0, 0]
    with pytest.raises(LoaderError, match="needs a seed"):
        make(range(3))


# -- losses, filters --


def test_dice_is_the_formula():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 4, 4, 4, dtype=torch.float64), torch.randint(0, 3, (2, 4, 4, 4))
    dice = cstorch.nn.DiceLoss(3, include_background=True)(logits, labels)
    p, t = logits.softmax(1), torch.nn.functional.one_hot(labels, 3).movedim(-1, 1).double()
    expected = 2 * (p * t).sum((2, 3, 4)) / (p.sum((2, 3, 4)) + t.sum((2, 3, 4)) + 1e-6)
    torch.testing.assert_close(dice, expected, rtol=1e-12, atol=0)  # float64, summed in another order
    without = cstorch.nn.DiceLoss(3)(logits, labels)
    assert (without[:, 0] == 0).all()
    torch.testing.assert_close(without[:, 1:], expected[:, 1:], rtol=1e-12, atol=0)
    both = cstorch.nn.DiceCELoss(3, include_background=False, wc=0.25, wd=2.0)(logits, labels)
    cross = torch.nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(both, 0.25 * cross + 2 * (1 - expected[:, 1:].mean()), rtol=1e-12, atol=0)


def test_small_functions(monkeypatch):
    assert cstorch.nn.functional.one_hot(torch.tensor([1, 0]), 3).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert cstorch.nn.functional.bias_add(torch.zeros(2, 3), torch.tensor([1.0, 2.0]), 0).tolist() == [[1] * 3, [2] * 3]
    wanted = tools.make_param_filter(["*.bias", "norm*"])
    assert [wanted(name, None) for name in ("fc.bias", "norm.weight", "fc.weight")] == [True, True, False]
    calls = []
    once = tools.call_once(lambda: calls.append("again"))(lambda: calls.append("first") or 5)
    assert (once(), once(), calls) == (5, 5, ["first", "again"])
    monkeypatch.setenv("FIRSTLOSS_TEST", "before")
    with tools.override_env_vars(FIRSTLOSS_TEST="inside", FIRSTLOSS_OTHER="1"):
        assert tools.os.environ["FIRSTLOSS_TEST"] == "inside"
    assert tools.os.environ["FIRSTLOSS_TEST"] == "before" and "FIRSTLOSS_OTHER" not in tools.os.environ


# -- schedules of one's own --


class WarmUp(cstorch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, peak, total_iters):
        self.peak = peak
        super().__init__(optimizer, total_iters)

    def _get_closed_form(self):
        return self.peak * torch.clamp(self.last_epoch / self.total_iters, max=1.0)


@pytest.mark.parametrize("name", ["CSX", "CPU"])
def test_a_schedule_of_ones_own_is_pytorchs_too(name):
    backend = cstorch.backend(name)
    with backend.device:
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)
    schedule = WarmUp(optimizer, 1.0, 4)

    @cstorch.trace
    def step(x):
        compiled(x).sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    for _ in range(7):
        step(torch.ones(1, 2))
    rates = [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert model.weight.tolist() == [[-sum(rates)] * 2] and schedule.get_last_lr() == [1.0]
    assert schedule.value(torch.arange(3)).tolist() == [0.0, 0.25, 0.5] and int(schedule.last_epoch) == 7
