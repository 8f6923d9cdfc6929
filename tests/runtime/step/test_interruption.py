"""Interrupts at any moment of a call: the state is that before or after the step, and training continues."""

import dis
import functools
import gc
import os
import random
import signal
import sys
import time

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.capture import recorder, session
from firstloss.interpreter import Uninterrupted
from firstloss.lower import aten, segments
from firstloss.runtime.device import dispatch
from firstloss.runtime.step import cache_entry, segmentation
from tests import scale

OURS = os.path.dirname(fl.__file__) + os.sep


class Boom(BaseException):
    pass


def boom(*_):
    raise Boom


@pytest.fixture(autouse=True)
def handler():
    before = signal.signal(signal.SIGUSR1, boom)
    yield
    signal.signal(signal.SIGUSR1, before)


@functools.cache
def leaving_offsets(code):
    """Where `code` is about to leave a `with` block: a line of its own to a tracer, but Python runs no signal's handler
    between the block's last call and that of `__exit__`, so that a lock in C is released whenever a signal arrives."""
    steps = [(step.offset, step.opname, step.argval) for step in dis.get_instructions(code)]
    leaves = [i for i in range(len(steps)) if [step[1:] for step in steps[i : i + 3]] == [("LOAD_CONST", None)] * 3]
    before = {steps[i - 1][0] for i in leaves if steps[i - 1][1] in ("SWAP", "NOP")}
    return before | {steps[i][0] for i in leaves}


class Interrupting:
    """Sends this process a signal, whose handler raises, at the n-th line of Firstloss that runs in the block; `lines`
    counts them."""

    def __init__(self, at=None, among=lambda frame: True):
        self.at, self.among = at, among
        self.lines = 0

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(OURS) or not self.among(frame):
            return None
        return self._line

    def _line(self, frame, event, argument):
        if event == "line" and frame.f_lasti not in leaving_offsets(frame.f_code):
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
        return self._line


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 160, bias=False), nn.Linear(160, 1)
        self.norm = nn.BatchNorm1d(160)

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x))))


class Deep(nn.Module):
    """Identical layers: split into segments if so few count."""

    def __init__(self, layers=6, width=8):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(),
                                                   nn.Linear(width, width)) for _ in range(layers)])  # fmt: skip

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Training:
    """A model, an optimizer and a step, on the backend or in eager PyTorch; gradients are kept."""

    def __init__(self, make, features, name, clear=False, tmp_path=None):
        self.backend = fl.backend(name, **({} if tmp_path is None else {"artifact_dir": tmp_path}))
        torch.manual_seed(1)
        with self.backend.device:
            self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        compiled = fl.compile(self.model, self.backend)

        def step(x):
            loss = compiled(x).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            if clear:
                self.optimizer.zero_grad()
            return loss

        self.step = fl.trace(step, check=False)
        self.x = torch.sin(torch.arange(16.0 * features) * 1.7).reshape(16, features)

    def state(self):
        """Everything that a step changes."""
        entries = [e for p in self.model.parameters() for _, e in sorted(self.optimizer.state.get(p, {}).items())]
        if not any(torch.as_tensor(e).any() for e in entries):
            entries = []  # created before the first step, as the step creates them
        grads = [p.grad for p in self.model.parameters()]
        tensors = [*self.model.state_dict().values(), *entries, *grads]
        return [None if t is None else torch.as_tensor(t).detach().clone() for t in tensors]


def same(a, b, close=False):
    """Whether they are bit-identical; with `close`, equal to eager PyTorch, which sums in another order than XLA."""
    if len(a) != len(b) or any((x is None) != (y is None) for x, y in zip(a, b, strict=True)):
        return False
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None]
    equal = (lambda x, y: torch.allclose(x, y, rtol=1e-3, atol=1e-4)) if close else torch.equal
    return all(equal(x, y) for x, y in pairs)


def states_of(name, make, features, steps, clear=False, tmp_path=None):
    """The state after each number of steps of uninterrupted training."""
    training = Training(make, features, name, clear, tmp_path)
    states = [training.state()]
    for _ in range(steps):
        training.step(training.x)
        states.append(training.state())
    return states


def undisturbed():
    """A trace or call leaves nothing behind in the process."""
    import jax
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    assert gc.isenabled()
    assert not session.tracing._is_owned()  # other threads would wait for it for ever
    assert session.trace is None and session.depth == 0
    assert not torch.compiler.is_compiling()
    assert sys.getprofile() is None
    assert torch.is_grad_enabled()
    assert not _get_current_dispatch_mode_stack()
    assert not jax.config.jax_enable_x64
    assert not aten.usable()
    assert dispatch._thread is None and not Uninterrupted._is_open
    assert torch.tensor is TENSOR and torch.Tensor.tolist is TOLIST
    assert torch.amp.GradScaler.scale is SCALE


TENSOR, TOLIST, SCALE = torch.tensor, torch.Tensor.tolist, torch.amp.GradScaler.scale

KINDS = {"whole": (Net, 6), "segments": (Deep, 8)}


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    """A kind of step; it must have been compiled as its name says."""
    pieces = []
    real = segmentation.cut

    def cut(*args, **options):
        cut_program = real(*args, **options)
        pieces.append(1 if cut_program is None else len(cut_program.segments))
        return cut_program

    monkeypatch.setattr(segmentation, "cut", cut)
    if request.param == "segments":
        monkeypatch.setattr(segments, "_SAVED", 60)  # calls worth a segment: so that a short model is split
        monkeypatch.setattr(segments, "LEAST_PERIODS_ON_CPU", 2)
    yield request.param
    assert pieces and all((count > 3) == (request.param == "segments") for count in pieces)


@pytest.fixture(autouse=True)
def no_checks_in_between(monkeypatch):
    """A step is sometimes retraced to check it, depending on the clock; each call here must run the same lines."""
    monkeypatch.setattr(cache_entry, "_CHECKING", 1e-9)


def sampled(lines, count):
    return sorted(random.Random(0).sample(range(1, lines + 1), min(count, lines)))


def steady(training):
    """The number of lines of a call, and of the calls until then: the first ones determine how to compare reads."""
    lines = []
    while len(lines) < 4 or len(set(lines[-3:])) > 1:
        with Interrupting() as counted:
            training.step(training.x)
        training.state()  # the host reads the next call's input
        lines.append(counted.lines)
    return lines[-1], len(lines)


@pytest.mark.parametrize("clear", [False, True])
def test_an_interrupt_at_any_line_leaves_a_consistent_state(kind, clear, tmp_path):
    make, features = KINDS[kind]
    traced = Training(make, features, "XLA", clear, tmp_path)
    lines, done = steady(traced)
    places = sampled(lines, scale.of(14, 30))
    outcomes = set()
    states = states_of("XLA", make, features, done + len(places) + 1, clear, tmp_path)
    eager = states_of("CPU", make, features, 4, clear)
    fl.backend(traced.backend)
    for at in places:
        with pytest.raises(Boom), Interrupting(at):
            traced.step(traced.x)
        undisturbed()
        now = traced.state()
        after = same(now, states[done + 1])
        assert after or same(now, states[done]), f"at line {at} of {lines}"
        outcomes.add(after)
        done += after
    traced.step(traced.x)
    assert same(traced.state(), states[done + 1])
    assert same(states[4], eager[4], close=True)
    assert outcomes == {False, True}  # otherwise this test checks nothing


def alarm(*_):
    raise KeyboardInterrupt


@pytest.fixture
def alarms():
    before = signal.signal(signal.SIGALRM, alarm)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted(alarms, seconds, call):
    """Whether `call` was interrupted `seconds` after it began."""
    try:
        try:
            alarms(seconds)
            call()
        finally:
            alarms(0)
    except KeyboardInterrupt:
        return True
    return False


def test_a_signal_at_any_moment_leaves_a_consistent_state(kind, alarms, tmp_path):
    make, features = KINDS[kind]
    traced = Training(make, features, "XLA", True, tmp_path)
    count = 60
    done, lasts = 8, float("inf")  # the fastest call: on a busy machine the others take longer, and are hit more often
    for _ in range(done):
        begin = time.perf_counter()
        loss = traced.step(traced.x)
        lasts = min(lasts, time.perf_counter() - begin)
        loss.item()
    states = states_of("XLA", make, features, done + count + 1, True, tmp_path)
    fl.backend(traced.backend)
    rng, hits = random.Random(0), 0
    for _ in range(count):
        hits += interrupted(alarms, rng.uniform(2e-5, 1.2 * lasts), lambda: traced.step(traced.x))
        undisturbed()
        now = traced.state()
        after = same(now, states[done + 1])
        assert after or same(now, states[done])
        done += after
    assert hits > 5  # of 60, most: otherwise this test checks little


def test_an_interrupt_in_the_first_call_leaves_a_consistent_state(kind, tmp_path):
    """While the step is traced, lowered, compiled or first run: the state is unchanged, and the next call works."""
    make, features = KINDS[kind]
    with Interrupting() as counted:
        Training(make, features, "XLA", False, tmp_path).step(torch.ones(16, features))
    states = states_of("XLA", make, features, 3, False, tmp_path)
    eager = states_of("CPU", make, features, 3, False)
    traced, done = Training(make, features, "XLA", False, tmp_path), 0
    ends_at = (0.02, 0.3, 0.7, 0.97, 0.997), (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99, 0.997, 0.9995)
    ends = [int(counted.lines * part) for part in scale.of(*ends_at)]
    for at in ends:
        traced, done = Training(make, features, "XLA", False, tmp_path), 0
        with Interrupting(at) as counted:
            try:
                traced.step(traced.x)
                done = 1
            except Boom:
                pass
        undisturbed()
        now = traced.state()
        done = int(same(now, states[1]))
        assert done or same(now, states[0]), f"at line {at}"
        for _ in range(3 - done):
            traced.step(traced.x)
        assert same(traced.state(), states[3]), f"at line {at}"
    assert same(states[3], eager[3], close=True)


class Refused(Exception):
    pass


@pytest.mark.parametrize("part", ["wrap", "complete"])
def test_an_exception_while_an_operation_is_recorded_is_the_steps(part, monkeypatch, tmp_path):
    """A handler of a signal may raise any exception, also one that a step could have raised itself, after which the
    step's earlier effects are kept: the operation whose recording it cuts short is none of them."""
    traced = Training(Net, 6, "XLA", True, tmp_path)
    before = [weight.detach().clone() for weight in traced.model.parameters()]
    owner, name = (recorder.DeferredTensor, "wrap") if part == "wrap" else (recorder, "_results")
    original, op = getattr(owner, name), []
    dispatch_ = recorder._record

    def recorded(call):
        op.append(call.op)
        return dispatch_(call)

    def interrupted(*args, **kwargs):
        result = original(*args, **kwargs)  # which the traceback keeps alive
        if op and op[-1] is torch.ops.aten.mm.default:
            raise Refused
        return result

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "_record", recorded)
        patch.setattr(owner, name, staticmethod(interrupted) if part == "wrap" else interrupted)
        with pytest.raises(Refused):
            traced.step(traced.x)
    undisturbed()
    assert torch.ops.aten.mm.default in op
    assert all(torch.equal(a, b) for a, b in zip(traced.model.parameters(), before, strict=True))
    for _ in range(2):
        traced.step(traced.x)
