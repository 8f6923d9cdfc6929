"""Setup for all tests: torchvision with a CPU build of torch, quick compilation, the runtime's fixtures.

Most tests are about a step's Python and train the same few layers; compilation would take nine tenths of their time. So
they share one folder of compiled executables, and XLA lowers as for users but generates code as quickly as possible.
Tests that need otherwise have a marker, and `make sweep` compiles all tests as for users.
"""

import gc
import importlib
import importlib.metadata
import os
import shutil
import sys
import tempfile

import pytest

gc.disable()  # until all tests are collected: nearly all objects created until then stay alive
HELPERS = {name.removesuffix(".py") for name in os.listdir(os.path.dirname(__file__))} - {"conftest"}
pytest.register_assert_rewrite(*(f"tests.{name}" for name in HELPERS))  # `python -O` drops all other assertions
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from benchmarks.zoo import find_zoo  # noqa: E402

# Not the user's; in the environment, so that child processes use it too.
os.environ.setdefault("FIRSTLOSS_CACHE", tempfile.mkdtemp(prefix="firstloss-tests-"))

settings.register_profile("untimed", deadline=None)  # the machine may be busy, and no test asserts how long it takes
settings.load_profile("untimed")


def newer_than_010() -> bool:
    """Whether JAX is 0.11 or newer, without importing it."""
    try:
        return tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) > (0, 10)
    except importlib.metadata.PackageNotFoundError:
        return False


# No LLVM optimization, and XLA's older code generator, which makes one kernel per module: a quarter of the time.
QUICK = {
    "xla_backend_optimization_level": (0, 3),  # (in tests, XLA's own default)
    "xla_cpu_parallel_codegen_split_count": (1, 32),
}
if not newer_than_010():  # newer versions lack the flag, and an unknown flag aborts the process
    QUICK["xla_cpu_use_fusion_emitters"] = (False, True)
# The user's own flags, since xdist's workers inherit those that this file has set in the parent process.
FLAGS = " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if f.removeprefix("--").split("=")[0] not in QUICK)
AS_USERS = bool(os.environ.get("FIRSTLOSS_AS_USERS"))
if not AS_USERS:  # in the environment, so that child processes use it too
    os.environ["XLA_FLAGS"] = " ".join([FLAGS, *(f"--{name}={value}".lower() for name, (value, _) in QUICK.items())])


def seed_no_absent_devices() -> None:
    """Do not let `torch.manual_seed` queue a call, with a formatted stack, for each kind of device that is missing
    here.

    This takes 2 ms per call in a test, a third of the time of tests that seed for each sample.
    """
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            for module in (device, getattr(device, "random", None)):  # has imported the function by name
                if hasattr(module, "_lazy_call"):
                    module._lazy_call = lambda *_, **__: None


find_zoo()
seed_no_absent_devices()


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


_compiled: dict[str, bool] = {"optimized": False}  # the options with which this process has compiled so far


@pytest.fixture(autouse=True)
def quick_compiles(request, compile_cache, monkeypatch):
    """Compile quickly, and let tests share compiled executables whatever their artifact folder."""
    marked = request.node.get_closest_marker
    optimized = not AS_USERS and bool(marked("optimized") or marked("gpu"))
    if "jax" in sys.modules and _compiled["optimized"] is not optimized:
        sys.modules["jax"].clear_caches()
        _compiled["optimized"] = optimized
    if optimized:
        from jax._src import compiler

        options = compiler.get_compile_options
        defaults = {name: default for name, (_, default) in QUICK.items()}

        def as_users(*args, env_options_overrides=None, **more):
            return options(*args, env_options_overrides={**defaults, **(env_options_overrides or {})}, **more)

        monkeypatch.setattr(compiler, "get_compile_options", as_users)
        monkeypatch.setenv("XLA_FLAGS", FLAGS)
    # If it was never imported, no compiled function can be cached.
    if "firstloss.runtime.jax_support" in sys.modules and not marked("own_compile_cache"):
        jaxlib = importlib.import_module(
            "firstloss.runtime.jax_support"
        )  # waits for a thread that is still importing it
        use = jaxlib.use_compilation_cache
        monkeypatch.setattr(jaxlib, "use_compilation_cache", lambda directory: use(str(compile_cache)))
    if "firstloss.runtime.step.executable_cache" in sys.modules and not marked("own_compile_cache"):
        executables = importlib.import_module("firstloss.runtime.step.executable_cache")
        monkeypatch.setattr(executables, "entry_of", lambda *_: None)


def pytest_collection_modifyitems(items):
    """Run tests that start processes first: they take longest, and no core should idle at the end."""
    items.sort(key=lambda item: not {"forked", "subprocess"} & vars(item.module).keys())


def freeze() -> None:
    """Exclude all existing objects from garbage collection and from a step's search for owners of its tensors.

    Both traverse all Python objects: with those left by a process's earlier tests, this takes half of the time.
    """
    if not AS_USERS:
        gc.collect()
        gc.freeze()


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):  # of the process that has created it
        shutil.rmtree(os.environ["FIRSTLOSS_CACHE"], ignore_errors=True)


def pytest_collection_finish():
    if not AS_USERS:
        gc.freeze()  # without a collection, which would traverse everything once more
    gc.enable()


def pytest_runtest_teardown(item, nextitem):
    if nextitem is not None and nextitem.module is not item.module:
        freeze()


@pytest.fixture
def by_kernels(request, monkeypatch):
    """Run traced steps with PyTorch's kernels: for tests of a step's Python that do not depend on compilation.

    Tests marked `optimized` are compiled anyway; `make sweep` compiles all of them.
    """
    from firstloss.runtime.step import compiling

    from .fuzz.interpret import interpreted

    if not AS_USERS and not request.node.get_closest_marker("optimized"):
        monkeypatch.setattr(compiling, "compile_step", interpreted)


@pytest.fixture
def backend(tmp_path):
    """An XLA backend with its own artifact folder."""
    import firstloss as fl

    return fl.backend("XLA", artifact_dir=tmp_path)


@pytest.fixture
def traced(monkeypatch):
    """A list with one item per trace, to count how often a step's Python runs."""
    from firstloss.runtime.step import tracing

    traces = []
    trace = tracing.trace_step

    def counted(*args, **options):
        traces.append(1)
        return trace(*args, **options)

    monkeypatch.setattr(tracing, "trace_step", counted)
    return traces


@pytest.fixture
def float64():
    """Make float64 the default dtype, so that rounding differences between two runs are negligible."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
