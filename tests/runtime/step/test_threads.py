"""Threads that trace, train, construct and compute concurrently get the results of each alone in eager PyTorch."""

import threading

import pytest
import torch
from torch import nn

import firstloss as fl
from tests.compiled_steps import check_runs_eagerly


def side_by_side(works):
    """Run all at once, each in a thread; re-raises their errors."""
    errors, start = [], threading.Barrier(len(works))

    def run(work):
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


MODELS = {
    "linear": lambda: nn.Linear(4, 3),
    "deep": lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)),
    "buffers": lambda: nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def training(backend, model, optimizer, seed):
    """A function that does one step; weights do not depend on other threads' draws."""
    with backend.device:
        net = MODELS[model]()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.normal_(generator=generator)
    optimizer = OPTIMIZERS[optimizer](net.parameters())
    compiled = fl.compile(net, backend)

    def step(x):
        loss = compiled(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = fl.trace(step)
    return lambda k: step(torch.sin(torch.arange(32.0).reshape(8, 4) * (k + 1))).item(), net


CASES = [("linear", "sgd"), ("deep", "adamw"), ("buffers", "sgd"), ("linear", "adafactor")]


@pytest.mark.parametrize("where", ["models made before", "models made in the threads"])
def test_models_can_be_trained_concurrently(where, tmp_path):
    def losses(name):
        out = [[] for _ in CASES]
        backend = fl.backend(name, artifact_dir=tmp_path)
        trainings = [] if "in the" in where else [training(backend, *case, i) for i, case in enumerate(CASES)]

        def work(i):
            run, net = trainings[i] if trainings else training(backend, *CASES[i], i)
            for k in range(5):
                out[i].append(run(k))
            out[i] += [float(t.sum()) for t in net.state_dict().values()]

        works = [lambda i=i: work(i) for i in range(len(CASES))]
        if name == "CPU":
            for work_alone in works:
                work_alone()
        else:
            side_by_side(works)
        return out

    for traced, eager in zip(losses("XLA"), losses("CPU"), strict=True):
        assert traced == pytest.approx(eager, rel=1e-5)  # XLA sums in another order: 6e-7


def test_other_work_can_run_during_a_trace(tmp_path):
    """A thread that draws, computes and trains eagerly is not affected by a concurrent trace."""
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    run, _ = training(backend, "deep", "adamw", 0)
    tracing, done = threading.Event(), threading.Event()

    def ordinary():
        eager = nn.Linear(3, 3, bias=False)
        nn.init.ones_(eager.weight)
        optimizer = torch.optim.Adafactor(eager.parameters(), lr=0.01)
        out = []
        for k in range(20):
            drawn = torch.rand(5)
            values = torch.tensor([[1.0, k], [2.0, 3.0]]).tolist()
            loss = eager(torch.full((2, 3), 0.1 * k)).sum() + torch.randn(())
            loss.backward()
            optimizer.step()
            out.append(
                (
                    drawn.tolist(),
                    values,
                    loss.item(),
                    bool(torch.compiler.is_compiling()),
                    torch.get_rng_state().sum().item(),
                )
            )
        return out, eager.weight.detach()

    torch.manual_seed(7)
    expected = ordinary()
    torch.manual_seed(7)
    actual = []

    def beside():
        tracing.wait()
        actual.append(ordinary())
        done.set()

    compiled = fl.trace(lambda x: (tracing.set(), done.wait(60), x.sum())[-1], check=False)
    side_by_side([beside, lambda: compiled(torch.ones(3))])
    assert actual[0][0] == expected[0] and torch.equal(actual[0][1], expected[1])
    run(0)


def test_constructors_can_run_concurrently():
    """Each of many deferred models has its own numbers from the single stream, and the stream continues after them."""
    models = [None] * 4

    def construct(i):
        with fl.deferred():
            models[i] = nn.Linear(50, 50, bias=False)

    torch.manual_seed(3)
    side_by_side([lambda i=i: construct(i) for i in range(len(models))])
    after = torch.rand(4)
    sums = sorted(fl.materialize_module(model).weight.sum().item() for model in models)
    torch.manual_seed(3)
    eager = sorted(nn.Linear(50, 50, bias=False).weight.sum().item() for _ in models)
    assert sums == eager and torch.equal(after, torch.rand(4))


class Loads(threading.local):
    """Attributes local to each thread, initialized from the arguments."""

    def __init__(self, scale):
        self.scale = scale


@pytest.mark.parametrize("make", [threading.local, lambda: Loads(2.0)], ids=["plain", "subclass"])
def test_thread_local_reads_are_per_thread(make, tmp_path):
    def losses(backend):
        local = make()
        local.scale = 3.0
        weight = nn.Parameter(torch.ones(2))

        @fl.trace
        def step(x):
            return (weight * x).sum() * getattr(local, "scale", 1.0)

        actual = []

        def call():
            actual.append(step(torch.ones(2)).item())

        for number in range(6):
            if number == 3:
                local.scale = 5.0
            call()
            side_by_side([call])
        return actual

    expected = losses(fl.backend("CPU"))
    assert len(set(expected)) == 3
    assert losses(fl.backend("XLA", artifact_dir=tmp_path)) == expected


def test_using_the_steps_tensors_in_another_thread_matches_eager():
    def run(backend, trace):
        results = []

        @trace
        def step(x):
            side_by_side([lambda: results.append(x + 1)])
            return x * 2

        return [step(torch.ones(2)) for _ in range(2)], results

    check_runs_eagerly(run, f"{__file__}:.*another thread")
