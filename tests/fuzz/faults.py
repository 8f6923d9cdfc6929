"""Faults at random moments of public calls: afterwards the process goes on, and weights are what they should be.

`generate(seed)` is a program's text: a model, a call, and a fault: a signal whose handler raises, or uses Firstloss; an
exception in a hook or a constructor; threads that make the same call; a fork; a full disk (RLIMIT_FSIZE); no memory
(RLIMIT_AS); SIGKILL while a process writes. A signal comes at a random time or, from Python 3.12 on, at a random point:
each place in Firstloss at which Python handles signals is as likely, however short the time between it and the next.
`check(source)` makes the call with the fault, and then checks that

- weights, ties, parameters' identities and files are what they were before or what the call makes,
- the same call, made again, does what it does without the fault,
- eager construction, generators, the garbage collector, signal handlers, grad mode and patched functions are whole.

A moment is drawn as a fraction of the time that the call takes, so a program does not always fail again.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import gc
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback as tracebacks
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import firstloss as fl
from firstloss.capture import session
from firstloss.interpreter import Uninterrupted, gc_thresholds, switch_interval

from .outcome import DIFFERS, FOREIGN, SAME, Outcome

# -- models ------------------------------------------------------------------------------------------------------------

_countdown = [-1]  # until the constructor, or a hook, raises


class Raised(Exception):
    """Raised by models' own code."""


def _user_code() -> None:
    _countdown[0] -= 1
    if _countdown[0] == 0:
        raise Raised


class Plain(nn.Module):
    """Layers with weights that share memory, and a view that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(6):
            _user_code()
            self.layers.append(nn.Linear(8, 8))
        self.embedding = nn.Embedding(50, 8)
        _user_code()
        self.register_buffer("view", self.embedding.weight.data[:3])
        self.tied = nn.ParameterList(layer.weight.data for layer in self.layers)
        _user_code()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            _user_code()
            x = layer(x)
        return x.sum() + self.view.sum()

    @staticmethod
    def ties(model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of tensors that begin at the same address."""
        yield from zip((layer.weight for layer in model.layers), model.tied, strict=True)
        yield model.view, model.embedding.weight


class Special(Plain):
    """Weights that are drawn until they fit, factorized, computed from values, copied, cast and edited."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.trunc_normal_(self.layers[0].weight, std=2.0)
        nn.init.orthogonal_(self.layers[1].weight)
        with torch.no_grad():
            self.layers[2].weight[1:3].mul_(2).add_(self.layers[0].weight[0])
            self.layers[3].bias.fill_(self.layers[3].weight.abs().max().item())
        _user_code()
        self.copied = copy.deepcopy(self.layers[4])
        self.copied.weight.data = self.copied.weight.data.double()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))


class Large(Plain):
    """Weights large enough for several threads, and for a few moments of writing."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 30_000)
        self.more = nn.Parameter(torch.randn(300, 700))


class Huge(Plain):
    """More than the memory that is left."""

    def __init__(self) -> None:
        super().__init__()
        self.huge = nn.Parameter(torch.rand(4096, 4096))


MODELS = {"Plain": Plain, "Special": Special, "Large": Large, "Huge": Huge}


def _eager(model: str) -> nn.Module:
    torch.default_generator.manual_seed(3)  # torch.manual_seed has a lock that a forked process may find held
    return MODELS[model]()


def _deferred(model: str) -> nn.Module:
    torch.default_generator.manual_seed(3)
    return fl.deferred_init(MODELS[model])


def _compare(model: nn.Module, expected: dict[str, torch.Tensor], parameters: list[nn.Parameter] | None = None) -> None:
    """Compare a model with the expected values; `parameters` are those that it had before."""
    found = model.state_dict()
    assert list(found) == list(expected), "other names"
    for name, tensor in found.items():
        other = expected[name]
        assert tensor.dtype == other.dtype and torch.equal(tensor, other), f"{name} has another value"
    for one, other in Plain.ties(model):
        assert one.data_ptr() == other.data_ptr(), "weights do not share memory any more"
    for parameter in model.parameters():
        assert isinstance(parameter, nn.Parameter), f"a weight is a {type(parameter).__name__}"
    if parameters is not None:
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True)), "parameters were replaced"


# -- calls -------------------------------------------------------------------------------------------------------------


class Call:
    """A public call: `prepare`, `run` with the fault, `verify`, in this order. `folder` is empty at first."""

    threads = True  # whether threads may make it at once
    writes = False
    memory = True  # whether it can run out of memory with an error; XLA ends the process

    def __init__(self, model: str, folder: str) -> None:
        self.name, self.folder = model, folder
        self.path = os.path.join(folder, "it")
        self.eager = _eager(model)
        self.expected = {name: tensor.clone() for name, tensor in self.eager.state_dict().items()}

    def prepare(self) -> None:
        """Before the fault."""

    def run(self, thread: int = 0) -> None:
        """With the fault; `thread` is a number."""
        raise NotImplementedError

    def verify(self) -> None:
        """Raise an AssertionError if anything is not as it should be."""
        raise NotImplementedError


class Capture(Call):
    """Construction, deferred."""

    threads = False  # they share PyTorch's generator, in eager construction too

    def run(self, thread: int = 0) -> None:
        _deferred(self.name)

    def verify(self) -> None:
        _compare(fl.materialize_module(_deferred(self.name)), self.expected)


class Deferred(Call):
    """A call of a deferred model; later ones materialize it."""

    def prepare(self) -> None:
        self.model = _deferred(self.name)
        self.parameters = list(self.model.parameters())

    def verify(self) -> None:
        _compare(fl.materialize_module(self.model), self.expected, self.parameters)
        assert not fl.is_deferred(self.model)


class Materialize(Deferred):
    def run(self, thread: int = 0) -> None:
        fl.materialize_module(self.model)


class Forward(Deferred):
    def run(self, thread: int = 0) -> None:
        self.model(torch.ones(2, 8)).backward()

    def verify(self) -> None:
        super().verify()
        result, expected = self.model(torch.ones(2, 8)), self.eager(torch.ones(2, 8))
        assert torch.equal(result, expected), "another result"


class Values(Deferred):
    """Values of single weights."""

    def run(self, thread: int = 0) -> None:
        for parameter in self.parameters[:: 1 + thread]:
            parameter.detach().sum().item()


class Copies(Deferred):
    """Copies, which stay deferred."""

    def run(self, thread: int = 0) -> None:
        copy.deepcopy(self.model)  # not .to(), in which eager PyTorch, too, may be interrupted inside torch.no_grad


class Load(Deferred):
    """Loading of a checkpoint."""

    threads = False  # they would load into one model

    def prepare(self) -> None:
        fl.save(self.expected, self.path)
        super().prepare()
        self.expected = {name: tensor.clone() for name, tensor in self.expected.items()}
        self.model.register_load_state_dict_pre_hook(lambda *_: _user_code())

    def run(self, thread: int = 0) -> None:
        self.model.load_state_dict(fl.load(self.path))


class Save(Call):
    """Saving, over an earlier checkpoint."""

    threads = False
    writes = True

    def prepare(self) -> None:
        self.before = {name: tensor + 1 for name, tensor in self.expected.items()}
        fl.save(self.before, self.path)

    def run(self, thread: int = 0) -> None:
        fl.save(self.expected, self.path)

    def verify(self) -> None:
        found = fl.load(self.path)
        assert _equal(found, self.before) or _equal(found, self.expected), "neither the old nor the new checkpoint"
        fl.save(self.expected, self.path)
        assert _equal(fl.load(self.path), self.expected), "saved again, another checkpoint"
        assert os.listdir(self.folder) == ["it"], f"left behind: {os.listdir(self.folder)}"


class SaveFile(Save):
    """Saving to one file."""

    def __init__(self, model: str, folder: str) -> None:
        super().__init__(model, folder)
        self.path += random.Random(folder).choice([".safetensors", ".pt"])

    def verify(self) -> None:
        found = fl.load(self.path)
        assert _equal(found, self.before) or _equal(found, self.expected), "neither the old nor the new file"
        self.run()
        assert _equal(fl.load(self.path), self.expected), "saved again, another file"


class SaveInitialized(Deferred):
    """Weights straight to disk."""

    threads = False
    writes = True

    def run(self, thread: int = 0) -> None:
        fl.save_initialized(self.model, self.path)

    def verify(self) -> None:
        if os.path.exists(os.path.join(self.path, "model.safetensors.index.json")) or os.path.exists(
            os.path.join(self.path, "model.safetensors")
        ):
            found = fl.load(self.path)
            assert _equal({name: found[name] for name in self.expected}, self.expected), "incomplete files"
        self.run()
        found = fl.load(self.path)
        assert _equal({name: found[name] for name in self.expected}, self.expected), "other files"
        super().verify()


class Step(Call):
    """A compiled training step, whose numbers are exact in float32: weights tell how many steps were done."""

    memory = False
    threads = False

    def prepare(self) -> None:
        self.backend = fl.backend("XLA", artifact_dir=os.path.join(self.folder, "artifacts"))
        with self.backend.device:
            self.model = nn.Linear(4, 3)
            for parameter in self.model.parameters():
                nn.init.zeros_(parameter)
        compiled = fl.compile(self.model, self.backend)
        optimizer = torch.optim.SGD(compiled.parameters(), lr=1.0)
        self.counter = {"calls": 0}

        @fl.trace
        def step(x: torch.Tensor) -> torch.Tensor:
            _user_code()
            loss = compiled(x).sum()
            _user_code()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.counter["calls"] += 1
            _user_code()
            return loss

        self.step, self.optimizer = step, optimizer
        if random.Random(self.folder).random() < 0.7:
            for _ in range(2):
                step(torch.ones(2, 4))

    def _done(self) -> int:
        """How many steps the weights, the gradients and the counter say were done."""
        weight, bias = (parameter.detach().clone() for parameter in self.model.parameters())
        done = int(-bias[0].item() / 2)
        assert torch.equal(weight, torch.full((3, 4), -2.0 * done)), "weights of different steps"
        assert torch.equal(bias, torch.full((3,), -2.0 * done)), "weights of different steps"
        return done

    def run(self, thread: int = 0) -> None:
        self.step(torch.ones(2, 4))

    def verify(self) -> None:
        before = self._done()
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = self.step(torch.ones(2, 4)).item()
        assert loss == -2.0 * before * (4 * 2 * 3 + 2 * 3), "the loss of other weights"
        assert self._done() == before + 1, "a step that was not one"


class Program(Deferred):
    """The recipes run by XLA."""

    memory = False
    threads = False

    def run(self, thread: int = 0) -> None:
        fl.init_program(self.model).run()

    def verify(self) -> None:
        found = fl.init_program(self.model).run()
        for name, array in found.items():
            assert np.array_equal(np.asarray(array), self.expected[name].numpy()), f"{name} has another value"
        super().verify()


CALLS: dict[str, type[Call]] = {
    kind.__name__: kind
    for kind in (Capture, Materialize, Forward, Values, Copies, Load, Save, SaveFile, SaveInitialized, Step, Program)
}


def _equal(one: Any, other: dict[str, torch.Tensor]) -> bool:
    return sorted(one) == sorted(other) and all(torch.equal(one[name], other[name]) for name in other)


# -- faults ------------------------------------------------------------------------------------------------------------


def _signal(call: Call, rng: random.Random, duration: float) -> None:
    """A signal whose handler raises."""
    error = rng.choice([KeyboardInterrupt, Raised, TimeoutError, SystemExit])

    def handle(*_: Any) -> None:
        raise error

    try:
        with contextlib.suppress(error), _alarm(handle, rng.uniform(0, 1.1 * duration)):
            call.run()
    except RuntimeError as wrapped:
        # PyTorch collects exceptions in load_state_dict; one in Python's Condition.wait leaves it without its lock.
        known = ("in loading state_dict", "cannot release un-acquired lock", "release unlocked lock")
        if not any(words in str(wrapped) for words in known):
            raise
    except KeyError as wrapped:  # one in Python's Thread.start, which then looks for the thread among those not begun
        if "Thread(" not in str(wrapped):
            raise
    if isinstance(call, Load):  # PyTorch's own load_state_dict may have been interrupted in torch.no_grad, as in eager
        torch.set_grad_enabled(True)


def _point(call: Call, rng: random.Random, duration: float) -> None:
    """A signal whose handler raises, at one of the points at which Python handles signals."""
    if not hasattr(sys, "monitoring"):
        return _signal(call, rng, duration)
    passed = _points(call)
    point = rng.choice(sorted(passed))
    left = rng.choice([1, rng.randint(1, passed[point])])

    def visit(it: Point) -> None:
        nonlocal left
        if it == point:
            left -= 1
            if not left:
                signal.raise_signal(signal.SIGALRM)

    def handle(*_: Any) -> None:
        raise Raised

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with contextlib.suppress(Raised), _watched(visit):
            call.run()
    except RuntimeError as wrapped:
        if "in loading state_dict" not in str(wrapped):
            raise
    finally:
        signal.signal(signal.SIGALRM, before)
    if isinstance(call, Load):  # as in `_signal`
        torch.set_grad_enabled(True)


Point = tuple[str, str, int, int]  # a file, a function, its first line, and the offset of the instruction

_known_points: dict[tuple[str, str], Counter[Point]] = {}


def _points(call: Call) -> Counter[Point]:
    """The points that such a call passes, and how often."""
    key = call.name, type(call).__name__
    if key not in _known_points:
        passed: Counter[Point] = Counter()
        for attempt in ("one", "another"):  # of steps, one may be traced and the other compiled already
            inner = os.path.join(call.folder + "-points", attempt)
            os.makedirs(inner)
            other = type(call)(*key[:1], inner)
            other.prepare()
            with _watched(lambda point: passed.update([point])):
                other.run()
            shutil.rmtree(inner, ignore_errors=True)
        _known_points[key] = passed
    return _known_points[key]


@contextlib.contextmanager
def _watched(visit: Callable[[Point], None]) -> Iterator[None]:
    """Call `visit` at each point that the main thread passes in Firstloss, and in context managers."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore] # since Python 3.12
    events, tool = monitoring.events, monitoring.PROFILER_ID
    main, folder = threading.main_thread().ident, os.path.dirname(fl.__file__)

    def at(code: Any, offset: int, *_: Any) -> None:
        if code.co_filename.startswith(folder) or code.co_filename == contextlib.__file__:
            if threading.get_ident() == main:
                visit((code.co_filename, code.co_qualname, code.co_firstlineno, offset))

    monitoring.use_tool_id(tool, "faults")
    monitoring.register_callback(tool, events.PY_START, at)
    monitoring.register_callback(tool, events.C_RETURN, at)
    monitoring.set_events(tool, events.PY_START | events.CALL)  # which includes C_RETURN
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)


def _handler(call: Call, rng: random.Random, duration: float) -> None:
    """A signal whose handler uses PyTorch and Firstloss, and returns."""
    done = []

    def handle(*_: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            kind = nn.BatchNorm1d if isinstance(call, Step) else nn.Linear  # a step's draws cannot be initialized
            done.append(fl.materialize_module(fl.deferred_init(kind, 3, 2)))
        assert isinstance(done[-1].weight, nn.Parameter)

    with _alarm(handle, rng.uniform(0, 1.1 * duration)):
        call.run()
        time.sleep(0.1 * duration)


@contextlib.contextmanager
def _alarm(handle: Callable[..., None], seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


def _exception(call: Call, rng: random.Random, duration: float) -> None:
    """An exception in a constructor, a forward pass, a hook or a step."""
    _countdown[0] = rng.randrange(1, 12)
    try:
        with contextlib.suppress(Raised):
            call.run()
    finally:
        _countdown[0] = -1


def _threads(call: Call, rng: random.Random, duration: float) -> None:
    """The same call in several threads at once."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(3)

    def run(number: int) -> None:
        barrier.wait()
        try:
            call.run(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _fork(call: Call, rng: random.Random, duration: float) -> None:
    """A fork at some moment of the call, whose child makes and checks a model of its own."""
    statuses: list[int] = []

    def fork() -> None:
        time.sleep(rng.uniform(0, duration))
        child = os.fork()
        if child:
            statuses.append(os.waitpid(child, 0)[1])
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        status = 1
        try:
            torch.set_num_threads(1)  # as loaders' workers do: OpenMP's threads are gone
            _compare(fl.materialize_module(_deferred("Plain")), _eager("Plain").state_dict())
            status = 0
        except BaseException:
            tracebacks.print_exc()
        finally:
            os._exit(status)

    # From a thread: a signal's handler would wait for locks that it has interrupted, such as those of Python's pools.
    forking = threading.Thread(target=fork)
    forking.start()
    try:
        call.run()
    finally:
        forking.join()
    assert statuses == [0], "a forked process could not construct and materialize"


def _full_disk(call: Call, rng: random.Random, duration: float) -> None:
    """No file may become larger than a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (rng.choice([0, 1, 100, 5000, 100_000, 1_000_000]), before[1]))
    try:
        with contextlib.suppress(fl.errors.SaveError):
            call.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _no_memory(call: Call, rng: random.Random, duration: float) -> None:
    """Little memory is left."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    # Enough to start threads: Python's Thread.start waits forever for one that has no memory for its first lines.
    left = (24 << 20) + rng.randrange(200 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (used + left, before[1]))
    try:
        call.run()
    except (MemoryError, fl.errors.FirstlossError):
        pass
    except RuntimeError as error:
        if not any(words in str(error) for words in ("memory", "can't start new thread", "Resource temporarily")):
            raise
    except OSError as error:
        if error.errno not in (11, 12):
            raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _kill(call: Call, rng: random.Random, duration: float) -> None:
    """A process that is killed while it makes the call."""
    child = os.fork()
    if not child:
        try:
            call.run()
        finally:
            os._exit(0)
    time.sleep(rng.uniform(0, duration))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


FAULTS: dict[str, tuple[Callable[[Call, random.Random, float], None], Callable[[type[Call]], bool]]] = {
    "signal": (_signal, lambda call: True),
    "point": (_point, lambda call: call is not Forward),  # which passes 800,000
    "handler": (_handler, lambda call: True),
    "exception": (_exception, lambda call: call in (Capture, Forward, Load, Step)),
    "threads": (_threads, lambda call: call.threads),
    "fork": (_fork, lambda call: call.memory),  # JAX does not survive forks
    "full disk": (_full_disk, lambda call: call.writes),
    "no memory": (_no_memory, lambda call: call.memory),
    "kill": (_kill, lambda call: call.writes),
}


# -- programs ----------------------------------------------------------------------------------------------------------


def generate(seed: int) -> str:
    """The program of `seed`."""
    rng = random.Random(f"faults {seed}")
    fault = rng.choice(["signal", "signal", *FAULTS])
    call = rng.choice([name for name, kind in CALLS.items() if FAULTS[fault][1](kind)])
    model = rng.choice(["Plain", "Special", "Large"] if fault != "no memory" else ["Huge"])
    return (
        f'"""seed {seed}: {call}, {fault}, {model}."""\n'
        f"MODEL, CALL, FAULT, SEED = {model!r}, {call!r}, {fault!r}, {seed}\n"
    )


_durations: dict[tuple[str, str], float] = {}


def _duration(name: str, kind: type[Call], folder: str) -> float:
    """How long a call takes without a fault, the second time."""
    key = name, kind.__name__
    if key not in _durations:
        for attempt in ("first", "second"):
            inner = os.path.join(folder, attempt)
            os.mkdir(inner)
            call = kind(name, inner)
            call.prepare()
            begin = time.perf_counter()
            call.run()
            _durations[key] = time.perf_counter() - begin
            shutil.rmtree(inner, ignore_errors=True)  # a compiled step may still be written to it
    return _durations[key]


def _functions() -> list[Any]:
    """Functions that are replaced at times."""
    names = [
        (torch, "empty"), (torch, "tensor"), (torch, "load"), (torch, "manual_seed"), (torch.Tensor, "data_ptr"),
        (torch.Tensor, "numpy"), (torch.Tensor, "item"), (nn.Parameter, "__new__"), (nn.Module, "to"),
        (nn.Module, "__init__"), (random, "random"), (np.random, "rand"), (builtins, "print"), (gc, "collect"),
        (gc, "disable"), (os, "getcwd"), (time, "time"), (warnings, "warn"),
    ]  # fmt: skip
    return [vars(owner).get(name) for owner, name in names]


def _process() -> dict[str, Any]:
    """What a call must leave as it was."""
    return {
        "handlers": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "collector": (gc.isenabled(), gc_thresholds.get()),  # which a thread of the backend may have changed meanwhile
        "switch interval": switch_interval.get(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "dispatch keys": str((torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())),
        "functions": _functions(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "open captures": (bool(session.depth), session.trace),
        "uninterrupted": Uninterrupted._is_open,
        "Python's generator": random.getstate(),
        "NumPy's generator": repr(np.random.get_state()),
    }


def check(source: str, traceback: bool = False) -> Outcome:
    """Make the call with its fault, and check what it leaves."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    kind, fault = CALLS[scope["CALL"]], FAULTS[scope["FAULT"]][0]
    folder = tempfile.mkdtemp()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            duration = _duration(scope["MODEL"], kind, folder)
            inner = os.path.join(folder, str(scope["SEED"]))
            os.mkdir(inner)
            call = kind(scope["MODEL"], inner)
            call.prepare()
            fl.materialize_module(
                fl.deferred_init(nn.Linear, 2, 2)
            )  # from the first one on, some functions are replaced
            before = _process()
            fault(call, random.Random(scope["SEED"]), duration)
            for what, value in _process().items():
                assert value == before[what], f"{what} changed"
            assert type(torch.ones(2)) is torch.Tensor, "an eager tensor is not one"
            _compare(_eager("Plain"), _expected_of_plain())
            call.verify()
    except AssertionError as error:
        if traceback:
            tracebacks.print_exc()
        return Outcome(DIFFERS, str(error) or _where(error), scope["FAULT"])
    except BaseException as error:
        if traceback:
            tracebacks.print_exc()
        what = " ".join(str(error).split())[:200].replace(folder, "")
        return Outcome(FOREIGN, f"{type(error).__name__}: {what}", _where(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        torch.set_grad_enabled(True)  # for the next program
    return Outcome(SAME)


_plain: dict[str, torch.Tensor] = {}


def _expected_of_plain() -> dict[str, torch.Tensor]:
    if not _plain:
        _plain.update({name: tensor.clone() for name, tensor in _eager("Plain").state_dict().items()})
    return _plain


def _where(error: BaseException) -> str:
    frame = tracebacks.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


__all__ = ["check", "generate"]
