"""Threads that use one deferred model, and signals at random moments: weights, ties and captures stay whole."""

import copy
import gc
import random
import signal
import threading
import time

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.capture import recorder, session
from firstloss.interpreter import Uninterrupted

SECONDS, INTERRUPTS = 2.0, 20  # at least, for each case


class Tied(nn.Module):
    """Weights that share memory, a view that is a buffer, a rejection loop, and a decomposition."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(40))
        self.embedding = nn.Embedding(50, 8)
        self.register_buffer("view", self.embedding.weight.data[:3])
        self.tied = nn.ParameterList(layer.weight.data for layer in self.layers)
        nn.init.trunc_normal_(self.layers[0].weight)
        nn.init.orthogonal_(self.layers[1].weight)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum() + self.view.sum()


def check(model, expected):
    assert all(type(p) is nn.Parameter for p in model.parameters())
    for layer, tied in zip(model.layers, model.tied, strict=True):
        assert layer.weight.data_ptr() == tied.data_ptr()
    assert model.view.data_ptr() == model.embedding.weight.data_ptr()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name


def eager():
    torch.manual_seed(3)
    return Tied()


def forward(model):
    return model(torch.ones(2, 8))


USES = {
    "materialize": fl.materialize_module,
    "forward": forward,
    "forward without gradients": torch.no_grad()(forward),
    "inference": torch.inference_mode()(forward),
    "state dict": lambda model: {name: t.clone() for name, t in model.state_dict().items()},
    "norms": lambda model: [p.norm() for p in model.parameters()],
    "numpy": lambda model: [p.detach().numpy() for p in model.parameters()],
    "pointers": lambda model: [p.data_ptr() for p in model.parameters()],
    "clones": lambda model: [p.detach().clone().sum() for p in model.parameters()],
    "mixed": None,
}


@pytest.mark.filterwarnings("ignore::firstloss.errors.NotMaterializedWarning")
@pytest.mark.parametrize("use", USES)
def test_threads_that_use_a_deferred_model_first(use):
    expected = eager()
    for trial in range(6):
        torch.manual_seed(3)
        model = fl.deferred_init(Tied)
        barrier, errors = threading.Barrier(4), []
        plain = [function for function in USES.values() if function is not None]
        uses = [USES[use] or plain[(trial * 4 + i) % len(plain)] for i in range(4)]

        def run(function, barrier=barrier, errors=errors, model=model):
            barrier.wait()
            try:
                function(model)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(function,)) for function in uses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        fl.materialize_module(model)
        check(model, expected)


@pytest.mark.parametrize("others_before", [False, True])
def test_a_tensor_becomes_real_between_operations_of_other_threads(others_before):
    """PyTorch's code for an operation, before and after its dispatch, holds tensors without the interpreter's lock."""
    model = fl.deferred_init(nn.Linear, 4, 4)
    if others_before:  # materialized while there was one thread
        fl.materialize_tensor(fl.deferred_init(nn.Linear, 4, 4).weight)
    order, begun = [], threading.Event()

    def operation(weight):
        begun.set()
        time.sleep(0.2)  # without the interpreter's lock
        order.append("operation")

    def use():
        if others_before:
            fl.materialize_tensor(model.bias)
        type(model.weight).__torch_function__(operation, (), (model.weight,), {})

    thread = threading.Thread(target=use)
    thread.start()
    begun.wait()
    fl.materialize_tensor(model.weight)
    order.append("real")
    thread.join()
    assert order == ["operation", "real"]


class Interrupts:
    """Real signals at random moments of calls, whose handler raises KeyboardInterrupt."""

    def __init__(self, longest):
        self._random, self._longest = random.Random(1), longest
        self._end = time.monotonic() + SECONDS
        self.count = 0

    def wants_more(self):
        return time.monotonic() < self._end or self.count < INTERRUPTS

    def during(self, function):
        try:
            signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-5, self._longest))
            try:
                function()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            self.count += 1


@pytest.fixture
def interrupts():
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield Interrupts
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def duration(function):
    function()
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def check_process(handlers):
    assert type(torch.ones(2)) is torch.Tensor and not session.depth and session.trace is None
    assert gc.isenabled() and torch.is_grad_enabled() and not Uninterrupted._is_open
    assert [signal.getsignal(s) for s in sorted(signal.valid_signals())] == handlers


def current_handlers():
    return [signal.getsignal(s) for s in sorted(signal.valid_signals())]


def test_interrupts_during_a_capture(interrupts):
    alarms = interrupts(duration(lambda: fl.deferred_init(Tied)))
    handlers = current_handlers()
    while alarms.wants_more():
        alarms.during(lambda: fl.deferred_init(Tied))
        check_process(handlers)
    torch.manual_seed(3)
    check(fl.materialize_module(fl.deferred_init(Tied)), eager())


def test_interrupts_during_materialization(interrupts):
    expected = eager()
    alarms = interrupts(duration(lambda: fl.materialize_module(fl.deferred_init(Tied))))
    handlers = current_handlers()
    while alarms.wants_more():
        torch.manual_seed(3)
        model = fl.deferred_init(Tied)
        alarms.during(lambda model=model: fl.materialize_module(model))
        check_process(handlers)
        check(fl.materialize_module(model), expected)


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_interrupts_while_a_step_is_traced(interrupts, tmp_path):
    backend = fl.backend("XLA", artifact_dir=str(tmp_path))
    with backend.device:
        model = nn.Linear(4, 4)
    compiled = fl.compile(model, backend)
    settings = {"text": "0"}

    @fl.trace
    def step(x):
        return compiled(x).sum() * float(settings["text"])

    def call():
        settings["text"] = str(float(settings["text"]) + 1)  # traced at each call
        return step(torch.ones(2, 4)).item()

    alarms = interrupts(0.02)
    call()
    handlers = current_handlers()
    while alarms.wants_more():
        alarms.during(call)
        check_process(handlers)
        assert type(fl.materialize_module(fl.deferred_init(nn.Linear, 2, 2)).weight) is nn.Parameter
    expected = model(torch.ones(2, 4)).sum().item() * (float(settings["text"]) + 1)
    assert call() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_edit_that_is_interrupted_is_made_or_not(is_late, monkeypatch):
    """Never half: a value whose operation is not complete could not be computed."""
    real = recorder._write

    def write(*args):
        if is_late:
            real(*args)
        raise KeyboardInterrupt

    weights = [fl.deferred_init(make, 300) for make in (torch.ones, torch.rand)]
    before = [fl.materialize_tensor(weight.clone()) for weight in weights]
    monkeypatch.setattr(recorder, "_write", write)
    for weight in weights:
        with pytest.raises(KeyboardInterrupt):
            weight.mul_(2)
    monkeypatch.undo()
    for weight, old in zip(weights, before, strict=True):
        assert torch.equal(fl.materialize_tensor(weight), old * 2 if is_late else old)


def test_a_factorization_has_the_bits_of_its_constructors_threads():
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(4)
            expected = nn.init.orthogonal_(torch.empty(513, 129))
            torch.manual_seed(4)
            weight = fl.deferred_init(lambda: nn.init.orthogonal_(torch.empty(513, 129)))
            torch.set_num_threads(3 - threads)
            assert torch.equal(fl.materialize_tensor(weight), expected)
            assert torch.get_num_threads() == 3 - threads
    finally:
        torch.set_num_threads(before)


# Calls of Firstloss with a new deferred model.
CALLS = {
    "capture": lambda model, folder: fl.deferred_init(Tied),
    "materialize": lambda model, folder: fl.materialize_module(model),
    "materialize a tensor": lambda model, folder: fl.materialize_tensor(model.tied[1]),
    "save_initialized": lambda model, folder: fl.save_initialized(model, folder),
    "save": lambda model, folder: fl.save(model.state_dict(), folder),
    "report": lambda model, folder: str(fl.init_program(model).report()),
    "copy": lambda model, folder: copy.deepcopy(model),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_while_gradients_are_disabled_leaves_them_enabled(call, tmp_path, monkeypatch):
    """At each of the places where a call enters `torch.no_grad`, as soon as that has changed the mode."""
    enter, left = torch.no_grad.__enter__, 0

    def interrupted(self):
        nonlocal left
        enter(self)
        if threading.current_thread() is threading.main_thread() and not Uninterrupted._is_open:  # signals are handled
            left -= 1
            if not left:
                raise KeyboardInterrupt

    monkeypatch.setattr(torch.no_grad, "__enter__", interrupted)
    for place in range(1, 1000):
        model, left = fl.deferred_init(Tied), place
        try:
            CALLS[call](model, tmp_path / str(place))
        except KeyboardInterrupt:
            enabled = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
            assert enabled, place
        else:
            break
    assert left > 0 and place > (call == "save_initialized")
