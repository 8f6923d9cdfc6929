"""State outside Python's objects, and state reached without naming it, that a step reads: it changes at some calls, and
the losses are those of eager PyTorch."""

import abc
import collections
import concurrent.futures
import contextvars
import csv
import ctypes
import datetime
import functools
import importlib
import itertools
import json
import locale
import mmap
import multiprocessing
import os
import pathlib
import pickle
import queue
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref

import numpy as np
import pytest
import safetensors.torch
import torch

import firstloss as fl
from firstloss.errors import EagerStepWarning, GraphChangedError, GraphChangeWarning, TraceError
from firstloss.runtime.step import compiling, request
from tests import forked
from tests.fuzz.interpret import interpreted
from tests.small_training import scaled_step

CASES = {}
STEPS = 6


def case(make):
    """Register a function that returns the loss's factor, and what is done before the i-th call."""
    CASES[make.__name__] = make
    return make


def path():
    return os.path.join(tempfile.mkdtemp(), "file")


def writer(file, text=str):
    return lambda i: pathlib.Path(file).write_text(text(1 + i // 2))


# -- files --


@case
def opened_file():
    file = path()

    def get():
        with open(file) as opened:
            return float(opened.read())

    return get, writer(file)


@case
def path_read():
    file = pathlib.Path(path())
    return lambda: json.loads(file.read_text())["s"], writer(file, lambda n: json.dumps({"s": n}))


@case
def iterated_file():
    file = path()

    def get():
        with open(file) as opened:
            return float(next(csv.reader(opened))[1])

    return get, writer(file, lambda n: f"a,{n}\n")


@case
def pickle_file():
    file = path()

    def get():
        with open(file, "rb") as opened:
            return pickle.load(opened)

    return get, lambda i: pathlib.Path(file).write_bytes(pickle.dumps(1 + i // 2))


@case
def numpy_file():
    file = path() + ".npy"
    return lambda: float(np.load(file)), lambda i: np.save(file, np.array(1.0 + i // 2))


@case
def loaded_tensor():
    file = path()
    return lambda: torch.load(file), lambda i: torch.save(torch.tensor(1.0 + i // 2), file)


def safetensors_file(read):
    file = path()
    save = safetensors.torch.save_file
    return lambda: read(file), lambda i: save({"number": torch.tensor([1.0 + i // 2, 5.0])}, file)


@case
def safetensors_load():
    return safetensors_file(lambda file: safetensors.torch.load_file(file)["number"][0])


@case
def safetensors_slice():
    def read(file):
        with safetensors.safe_open(file, "pt") as opened:
            return opened.get_slice("number")[:1].sum()

    return safetensors_file(read)


@case
def storage_bytes():
    file = path()
    return (
        lambda: 0.1 * torch.UntypedStorage.from_file(file, nbytes=1, shared=False)[0],
        lambda i: pathlib.Path(file).write_bytes(bytes([1 + i // 2])),
    )


@case
def file_exists():
    file = path()
    return lambda: 2.0 if os.path.exists(file) else 1.0, lambda i: pathlib.Path(file).touch() if i == 3 else None


@case
def file_size():
    file = path()
    return lambda: float(os.path.getsize(file)), lambda i: pathlib.Path(file).write_text("x" * (1 + i // 2))


@case
def directory_listing():
    folder = tempfile.mkdtemp()
    return lambda: 1.0 + len(os.listdir(folder)), lambda i: pathlib.Path(folder, str(i // 2)).touch()


@case
def subprocess_output():
    file = path()
    return lambda: float(subprocess.check_output(["cat", file])), writer(file)


@case
def sqlite_database():
    base = sqlite3.connect(":memory:")
    base.execute("create table t (v real)")
    return (
        lambda: base.execute("select sum(v) from t").fetchone()[0],
        lambda i: base.execute("insert into t values (?)", [1.0 if i < 3 else 0.0]),
    )


@case
def socket_receive():
    reader, writer = socket.socketpair()
    return lambda: float(reader.recv(1)[0]), lambda i: writer.send(bytes([1 + i]))


@case
def shared_memory():
    memory = mmap.mmap(-1, 16)
    return lambda: float(memory[0]), lambda i: memory.__setitem__(0, 1 + i // 2)


@case
def multiprocessing_value():
    value = multiprocessing.Value("d", 1.0)
    return lambda: value.value, lambda i: setattr(value, "value", 1.0 + i // 2)


@case
def multiprocessing_event():
    event = multiprocessing.Event()
    return lambda: 2.0 if event.is_set() else 1.0, lambda i: event.set() if i == 3 else None


# -- the process --


@case
def working_directory():
    first, other = os.getcwd(), tempfile.mkdtemp()
    return lambda: 2.0 if os.getcwd() == other else 1.0, lambda i: os.chdir(other if i in (3, 4) else first)


@case
def environment_variable():
    return lambda: float(os.environ["SCALE"]), lambda i: os.environ.__setitem__("SCALE", str(1 + i // 2))


@case
def recursion_limit():
    limit = sys.getrecursionlimit()
    return (
        lambda: sys.getrecursionlimit() / limit,
        lambda i: sys.setrecursionlimit(limit + 1000 * (i in (3, 4))),
    )


@case
def process_arguments():
    def change(i):
        if i == 3:
            sys.argv.append("--fast")
        elif i == 5:
            sys.argv.remove("--fast")

    return lambda: 2.0 if "--fast" in sys.argv else 1.0, change


@case
def signal_handler():
    handler, first = (lambda *_: None), signal.getsignal(signal.SIGUSR1)
    return (
        lambda: 2.0 if signal.getsignal(signal.SIGUSR1) is handler else 1.0,
        lambda i: signal.signal(signal.SIGUSR1, handler if i in (3, 4) else first),
    )


@case
def clock():
    began = [time.monotonic()]
    return (
        lambda: 1.0 if time.monotonic() - began[0] < 1e6 else 2.0,
        lambda i: began.__setitem__(0, time.monotonic() - 2e6 * (i == 3)),
    )


@case
def todays_date():
    day = [0]
    return (
        lambda: float((datetime.datetime.now() - day[0]).days + 1),
        lambda i: day.__setitem__(0, datetime.datetime.now() - datetime.timedelta(days=i // 2, hours=1)),
    )


@case
def pytorch_setting():
    return (
        lambda: 2.0 if torch.get_float32_matmul_precision() == "high" else 1.0,
        lambda i: torch.set_float32_matmul_precision("high" if i in (3, 4) else "highest"),
    )


@case
def thread_count():
    first = torch.get_num_threads()
    return (
        lambda: 2.0 if torch.get_num_threads() != first else 1.0,
        lambda i: torch.set_num_threads(first + (i in (3, 4))),
    )


@case
def numpy_error_state():
    return (
        lambda: 2.0 if np.geterr()["divide"] == "ignore" else 1.0,
        lambda i: np.seterr(divide="ignore" if i in (3, 4) else "warn"),
    )


@case
def locale_setting():
    return lambda: 1.0 + len(locale.getlocale()[0] or ""), lambda i: locale.setlocale(locale.LC_ALL, "C")


@case
def errno_value():
    return lambda: 1.0 + ctypes.get_errno(), lambda i: ctypes.set_errno(i // 2)


@case
def c_library():
    library, file = ctypes.CDLL(None), path()
    return (
        lambda: 2.0 if library.access(file.encode(), os.R_OK) == 0 else 1.0,
        lambda i: pathlib.Path(file).touch() if i == 3 else None,
    )


# -- modules --


def module(name, **content):
    new = sys.modules[name] = types.ModuleType(name)
    vars(new).update(content)
    return new


@case
def module_imported_in_the_step():
    imported = module("outside_a", s=1.0)

    def get():
        import outside_a

        return outside_a.s

    def change(i):
        if i == 2:
            imported.s = 2.0
        elif i == 4:
            module("outside_a", s=3.0)

    return get, change


@case
def name_imported_in_the_step():
    imported = module("outside_b", s=1.0)

    def get():
        from outside_b import s

        return s

    return get, lambda i: setattr(imported, "s", 1.0 + i // 2)


@case
def module_added_later():
    sys.modules.pop("outside_c", None)

    def get():
        try:
            import outside_c
        except ImportError:
            return 1.0
        return outside_c.s

    return get, lambda i: module("outside_c", s=2.0) if i == 3 else None


@case
def module_by_computed_name():
    imported = module("outside_d", s=1.0)
    return lambda: importlib.import_module("outside" + "_d").s, lambda i: setattr(imported, "s", 1.0 + i // 2)


@case
def module_exists():
    sys.modules.pop("outside_e", None)
    return (
        lambda: 2.0 if "outside_e" in sys.modules else 1.0,
        lambda i: module("outside_e") if i == 3 else None,
    )


# -- weak references --


class Thing:
    s = 2.0


@case
def weak_reference():
    kept = [Thing()]
    reference = weakref.ref(kept[0])
    return (
        lambda: reference().s if reference() is not None else 1.0,
        lambda i: kept.clear() if i == 3 else None,
    )


@case
def weak_set():
    kept = [Thing(), Thing()]
    things = weakref.WeakSet(kept)
    return lambda: 1.0 + len(things), lambda i: kept.pop() if i == 3 else None


@case
def weak_dict():
    kept = [Thing()]
    things = weakref.WeakValueDictionary(a=kept[0])

    def change(i):
        if i == 2:
            kept[0].s = 3.0
        elif i == 4:
            kept.clear()

    return lambda: things["a"].s if "a" in things else 1.0, change


@case
def weak_proxy():
    kept = Thing()
    proxy = weakref.proxy(kept)
    return lambda: proxy.s, lambda i: setattr(kept, "s", 1.0 + i // 2)


@case
def finalizer_read():
    kept = [Thing()]
    finalizer = weakref.finalize(kept[0], lambda: None)
    return lambda: 2.0 if finalizer.alive else 1.0, lambda i: kept.clear() if i == 3 else None


# -- classes, functions --


@case
def changed_base_classes():
    other = type("Other", (), {"s": 3.0})
    cls = type("Own", (Thing,), {})
    instance = cls()
    return lambda: instance.s, lambda i: setattr(cls, "__bases__", (other,)) if i == 3 else None


@case
def abc_registration():
    base = abc.ABCMeta("Base", (), {})
    instance = type("Own", (), {})()
    return (
        lambda: 2.0 if isinstance(instance, base) else 1.0,
        lambda i: base.register(type(instance)) if i == 3 else None,
    )


@case
def function_signature():
    def told():
        pass

    return lambda: float(told.__doc__), lambda i: setattr(told, "__doc__", str(1 + i // 2))


@case
def future_result():
    future = concurrent.futures.Future()
    return lambda: 2.0 if future.done() else 1.0, lambda i: future.set_result(1) if i == 3 else None


@case
def queue_size():
    items = queue.SimpleQueue()
    return items.get, lambda i: items.put(1.0 + i)


@case
def threading_event():
    event = threading.Event()
    return lambda: 2.0 if event.is_set() else 1.0, lambda i: event.set() if i == 3 else None


@case
def context_variable():
    variable = contextvars.ContextVar("scale", default=1.0)
    return variable.get, lambda i: variable.set(1.0 + i // 2)


@case
def itertools_counter():
    numbers = itertools.count(1)
    return lambda: float(next(numbers)), lambda i: None


@case
def chain_map():
    first, second = {}, {"s": 1.0}
    maps = collections.ChainMap(first, second)

    def change(i):
        if i == 2:
            second["s"] = 2.0
        elif i == 4:
            first["s"] = 3.0

    return lambda: maps["s"], change


@case
def partialmethod():
    class Own:
        def scale(self, by):
            return by

        plain = functools.partialmethod(scale, 1.0)

    instance = Own()
    return (
        lambda: instance.plain(),
        lambda i: setattr(Own, "plain", functools.partialmethod(Own.scale, 2.0)) if i == 3 else None,
    )


def losses(backend, make):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    get, change = make()
    step = scaled_step(backend, get)

    values = []
    for i in range(STEPS):
        change(i)
        values.append(step(torch.randn(5, 4, generator=generator)).item())
    return values


@pytest.fixture(autouse=True)
def _restore_process(monkeypatch):
    """Restores the process's state, and does not compile: these tests are about the trace."""
    folder, argv, modules, environment = os.getcwd(), list(sys.argv), dict(sys.modules), dict(os.environ)
    spoken, limit, threads = locale.setlocale(locale.LC_ALL), sys.getrecursionlimit(), torch.get_num_threads()
    errors = np.geterr()
    monkeypatch.setattr(compiling, "compile_step", interpreted)
    yield
    os.chdir(folder)
    locale.setlocale(locale.LC_ALL, spoken)
    sys.setrecursionlimit(limit)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    np.seterr(**errors)
    sys.argv[:] = argv
    os.environ.clear()
    os.environ.update(environment)
    for name in sys.modules.keys() - modules.keys():
        if name.startswith("outside_"):
            del sys.modules[name]


def compare(name):
    eager = losses(fl.backend("CPU"), CASES[name])
    traced = losses(fl.backend("XLA"), CASES[name])
    torch.testing.assert_close(traced, eager, rtol=1e-5, atol=0)  # float32, six steps


# These look at all modules of the process, which include everything that other tests have imported.
ANY_MODULE = ("module_by_computed_name", "module_exists")


@pytest.mark.parametrize("name", [name for name in CASES if name not in ANY_MODULE])
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_changes_between_calls_match_eager(name):
    compare(name)


@pytest.mark.parametrize("name", ANY_MODULE)
def test_changes_of_any_module_match_eager(name, tmp_path):
    code = (
        "from firstloss.runtime.step import compiling\n"
        "from tests.runtime.guards import test_external_state\n"
        "compiling.compile_step = test_external_state.interpreted\n"
        f"test_external_state.compare({name!r})\n"
    )
    done = forked.run(["-c", code], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name, called",
    [
        ("opened_file", "open"),
        ("file_exists", "os.stat"),
        ("clock", "time.monotonic"),
        ("subprocess_output", "os."),
    ],
)
@pytest.mark.parametrize("on_host", [True, False], ids=["on this host", "on an accelerator"])
def test_the_warning_names_the_line_and_what_is_called(name, called, on_host, monkeypatch):
    if not on_host:
        monkeypatch.setattr(request, "on_cpu", lambda: False)
    category, how = (
        (EagerStepWarning, "would have to be traced at each call")
        if on_host
        else (GraphChangeWarning, "is traced at each call")
    )
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        losses(fl.backend("XLA"), CASES[name])
    texts = [str(w.message) for w in record if issubclass(w.category, category)]
    assert any(how in text and f"{__file__}:" in text and called in text for text in texts), texts


def test_a_profiler_continues_after_a_trace():
    """It is paused while the step is traced, and the step's reads are still recorded."""
    seen = []
    get, change = CASES["file_exists"]()

    def profiler(frame, event, argument):
        seen.append(event)

    @fl.trace
    def step(x):
        return x * get()

    x, losses = torch.ones(2), []
    fl.backend("XLA")
    old = sys.getprofile()
    sys.setprofile(profiler)
    try:
        for i in range(STEPS):
            change(i)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses.append(step(x))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(old)
    assert [r[0].item() for r in losses] == [1, 1, 1, 2, 2, 2] and seen


def test_an_unexplained_difference_at_the_second_call_is_not_an_error():
    """No step has run that should have been another; from then on its Python runs at each call."""
    hidden = itertools.count(1)

    from firstloss.runtime.guards.kinds.contents import ITERATOR_OF_C

    reader = ITERATOR_OF_C.reader
    ITERATOR_OF_C.reader = lambda held: None if held is hidden else reader(held)
    try:

        @fl.trace
        def step(x):
            return x * float(next(hidden))

        fl.backend("XLA")
        with pytest.warns(GraphChangeWarning):
            losses = [step(torch.ones(2))[0].item() for _ in range(4)]
    finally:
        ITERATOR_OF_C.reader = reader
    assert losses == [1, 2, 3, 4]


def test_refusing_changes_refuses_unexplained_ones():
    numbers = itertools.count(1)

    @fl.trace(changes="refuse")
    def step(x):
        return x * float(next(numbers))

    fl.backend("XLA")
    step(torch.ones(2))
    with pytest.raises(GraphChangedError):
        step(torch.ones(2))


@pytest.mark.parametrize("itself", [False, True], ids=["another", "a part of it"])
def test_a_file_and_an_argument_reached_in_another_way_match_eager(itself):
    """If arguments share memory and one is edited, the step's Python runs twice, and would read what it has written."""
    file = pathlib.Path(path())

    @fl.trace
    def step(x, y):
        number = float(file.read_text())
        file.write_text("7")
        x.mul_(2)
        return number * (x.sum() + y.sum())

    fl.backend("XLA")
    file.write_text("3")
    x = torch.ones(2, 2)
    if not itself:
        assert step(x, torch.ones(2)).item() == 30
        return
    with pytest.raises(TraceError, match="run twice"):
        step(x, x[0])
    assert torch.equal(x, torch.ones(2, 2))
