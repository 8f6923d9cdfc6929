"""External state that a step reads: files, clocks, the operating system.

It can change between calls although no object does, so that a step that reads it has to be traced at each call.
Settings of the process are handled in `step/process_settings.py`.

Detected while a step is traced, by the name of each C function that its Python code calls. Functions of unknown modules
count as reads, since nothing is known about them. Mere writes do not: they happen only where the step is traced.
"""

from __future__ import annotations

import builtins
import csv
import datetime
import io
import locale
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from ...compat.python_names import is_python_class
from ...compat.torch_names import DisableTorchDispatch
from ...interpreter import is_handling
from ...program.source import Source
from .packages import PACKAGE, is_closed, is_harmless_module, is_installed, is_runtime


class ExternalCall(NamedTuple):
    """A call of a function whose result cannot be guarded."""

    function: str
    line: Source | None  # the line of the user's code that called it

    @property
    def is_repeatable(self) -> bool:
        """Whether it may be called twice in place of once: it asks for something, and changes and consumes nothing."""
        return self.function.startswith("time.") or self.function in _QUERIES


class ExternalCalls:
    """The external calls of one trace.

    Attributes:
        calls: the calls whose results cannot be guarded, by the function's name.
        sets_by_string: user code calls `setattr` or `delattr`.
        warns: Python issues a warning.
        process_state: the C modules among `PROCESS_STATE` whose functions were called.
        handling: the caller of the step is handling an exception.
        generators: PyTorch generators, by id, whose states are read or set, each with its former state.
        initial_seed: the initial seed of PyTorch's default generator is read.
    """

    def __init__(self) -> None:
        self.calls: dict[str, ExternalCall] = {}
        self.sets_by_string: bool = False
        self.warns: bool = False
        self.process_state: set[str] = set()
        self.handling: bool = is_handling()
        self.generators: dict[int, tuple[torch.Generator, bytes]] = {}
        self.initial_seed: bool = False

    def ran(self, codes: Iterable[types.CodeType]) -> None:
        """Record Python code that has run, if it reads external state."""
        for code in codes:
            if code in _PYTHON_FUNCTIONS:
                self.calls.setdefault(_PYTHON_FUNCTIONS[code], ExternalCall(_PYTHON_FUNCTIONS[code], None))

    def called(self, function: Any, frame: types.FrameType) -> bool:
        """Record a call of a C function by the code of `frame`.

        Returns:
            Whether to report further calls of this function.
        """
        if function in _BY_STRING:
            name = frame.f_globals.get("__name__") or ""
            self.sets_by_string |= not is_closed(name) and not is_installed(name)
            return not self.sets_by_string
        owner = function.__self__
        if owner is torch.default_generator and function.__name__ == "initial_seed":
            self.initial_seed |= not _is_of_runtime(frame)
            return True
        if isinstance(owner, torch.Generator) and function.__name__ in _GENERATOR_METHODS:
            if id(owner) not in self.generators and owner is not torch.default_generator:
                self.generators[id(owner)] = (owner, state_of(owner))
            return True
        module, called = name_of(function)
        if function in _WARN:
            self.warns |= not _is_of_runtime(frame)
            return not self.warns
        if module in PROCESS_STATE:
            self.process_state.add(module)
            return False
        if function in _READ_HANDLED_EXCEPTION and not self.handling:
            return False
        if not is_external_call(function, module, frame):
            return False
        if called not in self.calls:
            counts, line = _called_by(frame, module in _IGNORED_IN_LIBRARIES)
            if counts:
                self.calls[called] = ExternalCall(called, line)
        return True


_BY_STRING = (setattr, delattr)
_WARN = (warnings.warn, warnings.warn_explicit)
_READ_HANDLED_EXCEPTION = (sys.exc_info, sys.exception)
_GENERATOR_METHODS = {"manual_seed", "seed", "initial_seed", "get_state", "set_state"}


def state_of(generator: torch.Generator) -> bytes:
    """The state of a PyTorch generator, in a form that can be compared."""
    with DisableTorchDispatch():
        return generator.get_state().numpy().tobytes()


def set_state(generator: torch.Generator, state: bytes) -> None:
    """Restore what `state_of` returned."""
    with DisableTorchDispatch():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


# C modules of the standard library whose functions depend on their arguments only.
_PURE = {"builtins", "math", "cmath", "_operator", "operator", "itertools", "_functools", "functools", "_collections",
         "collections", "_abc", "abc", "_sre", "re", "_struct", "struct", "_json", "json", "array", "copy", "_codecs",
         "codecs", "zlib", "binascii", "_bisect", "bisect", "_heapq", "heapq", "_random", "random", "unicodedata",
         "_thread", "threading", "_weakref", "weakref", "_string", "string", "atexit", "marshal", "_csv", "csv",
         "datetime", "_datetime", "_hashlib", "hashlib", "_md5", "_sha1", "_sha2", "_sha3", "_sha256", "_sha512",
         "_blake2", "_decimal", "decimal", "_statistics", "statistics", "_stat", "stat", "errno", "_warnings",
         "warnings", "_contextvars", "contextvars", "types", "typing", "_typing", "enum", "_opcode", "opcode", "_ast",
         "ast", "_tokenize", "_symtable", "_pickle", "pickle", "_elementtree", "pyexpat", "_zoneinfo", "zoneinfo",
         "_bz2", "_lzma", "_lsprof", "inspect", "_imp", "_frozen_importlib", "importlib", "_queue", "queue", "sys",
         "gc", "_io", "io", "_ctypes", "ctypes", "_suggestions", "_sysconfig", "_interpreters", "uuid",
         "_testcapi"}  # fmt: skip
# In other C modules of the standard library all functions read external state, except these, which write, convert or
# wait.
_NOT_READING: dict[str, set[str]] = {
    "posix": {"fspath", "_path_normpath", "_path_splitroot", "_path_splitroot_ex", "getpid", "cpu_count", "strerror",
              "write", "close", "mkdir", "remove", "unlink", "rename", "replace", "rmdir", "chmod", "chown", "link",
              "symlink", "truncate", "ftruncate", "fsync", "fdatasync", "utime", "kill", "putenv", "unsetenv", "isatty",
              "getcwd", "getcwdb", "chdir",
              "get_terminal_size", "sched_yield", "register_at_fork", "set_inheritable", "get_inheritable", "uname",
              "sysconf", "dup", "dup2", "_exit", "fchmod", "waitstatus_to_exitcode"},
    "time": {"sleep"},
    "_socket": {"htons", "htonl", "ntohs", "ntohl", "close"},
    "_signal": {"raise_signal"},
    "mmap": {"flush", "close"},
    "fcntl": {"flock", "lockf"},
    "resource": {"setrlimit"},
    "faulthandler": {"enable", "disable"},
    "_tracemalloc": {"start", "stop"},
}  # fmt: skip
_NOT_READING["nt"] = _NOT_READING["posix"]
_NOT_READING["socket"] = _NOT_READING["_socket"]
# Modules of which only some functions read external state.
_READING: dict[str, set[str]] = {
    "_io": {"open", "open_code", "read", "readline", "readlines", "readinto", "readinto1", "read1", "readall", "peek"},
    "builtins": {"open", "input"},
    "gc": {"get_objects", "get_referrers", "get_referents", "get_count", "get_stats"},
    "sys": {
        "getallocatedblocks",
        "_current_frames",
        "_current_exceptions",
        "getrefcount",
        "_getframe",
        "_getframemodulename",
        "getswitchinterval",
        "gettrace",
        "getprofile",
        "getdlopenflags",
        "get_asyncgen_hooks",
        "get_coroutine_origin_tracking_depth",
        "exc_info",
        "exception",
        "is_finalizing",
    },
    "_weakref": {"getweakrefcount", "getweakrefs"},
    "_thread": {"_count", "get_ident", "get_native_id", "stack_size"},
    "numpy": {"fromfile"},
    "functools": {"cache_clear", "cache_info"},
    "_ctypes": {"get_errno", "get_last_error"},
}


def _csv_dialects() -> tuple[Any, ...]:
    dialects = [csv.get_dialect(name) for name in csv.list_dialects()]
    fields = [(d.delimiter, d.doublequote, d.escapechar, d.lineterminator, d.quotechar, d.quoting, d.skipinitialspace)
              for d in dialects]  # fmt: skip
    return csv.field_size_limit(), *csv.list_dialects(), *fields


# C modules whose functions read state that the module keeps for the process, and how to read that state.
PROCESS_STATE: dict[str, Callable[[], tuple[Any, ...]]] = {"_csv": _csv_dialects}
# Python functions of the standard library, NumPy and PyTorch that read or set state of the process or the thread.
_PYTHON_FUNCTIONS: dict[types.CodeType, str] = {
    function.__code__: f"{function.__module__}.{function.__name__}"
    for function in (
        threading.active_count,
        threading.enumerate,
        np.get_printoptions,
        np.set_printoptions,
        torch.set_printoptions,
        locale.getlocale,
    )
    if isinstance(function, types.FunctionType)
}
_READING["io"] = _READING["_io"]
_QUERIES = {"os.stat", "os.lstat", "os.fstat", "os.listdir", "os.scandir", "os.access", "os.readlink", "os.statvfs"}
_CLOCKS = {"time", "datetime"}
# Read by libraries for messages and locks only: not counted if a library calls them.
_IGNORED_IN_LIBRARIES = {*_CLOCKS, "sys", "_thread", "_weakref"}
_NOW = {"now", "utcnow", "today"}
# What these read affects only what they write: messages, progress bars.
_WRITERS = {"logging", "warnings", "traceback", "linecache", "importlib", "tokenize", "tqdm", "rich", "tensorboard",
            "tensorboardX", "wandb", "mlflow", "loguru"}  # fmt: skip
# Parts of libraries that read files for their callers.
_READERS = ("torch.serialization", "torch.hub", "numpy.lib", "safetensors")


def name_of(function: Any) -> tuple[str, str]:
    """The module of a function, or of the class that it is a method of, and its name for messages."""
    owner = function.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        module = function.__module__ or getattr(owner, "__name__", "") or ""
        public_name = {"posix": "os", "nt": "os", "_io": "io", "io": "io"}.get(module, module)
        return module, function.__name__ if function.__name__ == "open" else f"{public_name}.{function.__name__}"
    cls = owner if isinstance(owner, type) else type(owner)
    return str(_defining(cls, function).__module__), f"{cls.__qualname__}.{function.__name__}"


def _defining(cls: type, method: Any) -> type:
    """The class of C that defines a method, which classes of Python may override."""
    bases = [base for base in cls.__mro__ if not is_python_class(base)]
    return next((base for base in bases if method.__name__ in vars(base)), cls)


def is_external_call(function: Any, module: str, frame: types.FrameType) -> bool:
    name, owner = function.__name__, function.__self__
    if module == "_thread" and (caller := frame.f_globals.get("__name__")) in sys.stdlib_module_names:
        if caller != "threading":  # detects recursion, as in `repr`
            return False
    if isinstance(owner, (io.StringIO, io.BytesIO)):
        return False
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return name in _NOW
    if module == "builtins" and owner is not None and not isinstance(owner, types.ModuleType):
        if _is_foreign(_defining(owner if isinstance(owner, type) else type(owner), function)):
            return True
    if module in _READING:
        return name in _READING[module]
    top = module.partition(".")[0]
    if not module:
        return name == "from_file"  # of PyTorch's storages
    if top in _PURE:
        return False
    if top in sys.stdlib_module_names:
        return name not in _NOT_READING.get(top, ())
    return not is_closed(module) and not is_harmless_module(module)


def _is_foreign(cls: type) -> bool:
    """Whether a class that claims to be a builtin belongs to an extension module that does not set `__module__`
    (safetensors)."""
    return bool(cls.__flags__ & _MADE_AT_RUN_TIME) and vars(builtins).get(cls.__name__) is not cls


_MADE_AT_RUN_TIME = 1 << 9  # Py_TPFLAGS_HEAPTYPE, which few of the builtin classes have


def _is_of_runtime(frame: types.FrameType | None) -> bool:
    """Whether the runtime itself makes a call, directly or through PyTorch."""
    while frame is not None and (frame.f_globals.get("__name__") or "").startswith("torch."):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def _called_by(frame: types.FrameType | None, not_in_libraries: bool) -> tuple[bool, Source | None]:
    """Whether user code makes the call of `frame`, directly or through a library, and the line of user code."""
    counts = False
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        top = name.partition(".")[0]
        if is_runtime(name) or frame.f_code.co_filename.startswith(PACKAGE):
            return counts, None
        if not counts and top in _WRITERS:
            return False, None
        if not is_closed(name) and not is_installed(name):
            return True, Source(frame.f_code.co_filename, frame.f_lineno)
        if name.startswith(_READERS):
            counts = True
        elif not counts and top not in sys.stdlib_module_names:
            if is_closed(name) or not_in_libraries:
                return False, None
            counts = True
        frame = frame.f_back
    return counts, None
