"""Run a training program eagerly and traced, and classify the outcome."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import random
import re
import sys
import tempfile
import types
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from traceback import print_exc
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import firstloss as fl
from firstloss.runtime.backend import Backend
from firstloss.runtime.device import host_tensors
from firstloss.runtime.step.untraced_calls import UntracedCalls

from .compare import Difference, compare
from .outcome import DIFFERS, DISCARDED, FOREIGN, REFUSED, SAME, Outcome

MODULE = "fuzzed"  # the module name of a program
_folder = tempfile.TemporaryDirectory(prefix="firstloss-fuzz-")  # of this process
_PATH = Path(_folder.name) / f"{MODULE}.py"
_ARTIFACTS = os.environ.get("FIRSTLOSS_FUZZ_ARTIFACTS", str(Path(_folder.name) / "artifacts"))
# Attributes of PyTorch's classes that programs may replace.
_PATCHED = [(cls, "forward") for cls in (nn.Linear, nn.Tanh, nn.Sequential, nn.LayerNorm, nn.GELU)] + [
    (cls, "step") for cls in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam)
]
_PATCHED += [(nn.functional, "linear"), (torch.Tensor, "mean")]


# The backend on which programs are traced: "XLA"; "MESH", a mesh of two devices, which XLA_FLAGS has to make; "SAME
# RUN", the same with `same_run`, compared bit for bit with one device, too; or "GPU", where steps are replayed as on a
# GPU, by the kernels of this CPU.
TRACED = os.environ.get("FIRSTLOSS_FUZZ_BACKEND", "XLA")
_OPTIONS: dict[str, dict[str, Any]] = {
    "XLA": {"artifact_dir": _ARTIFACTS},
    "MESH": {"artifact_dir": _ARTIFACTS, "mesh": {"fsdp": 2}},
    "SAME RUN": {"artifact_dir": _ARTIFACTS, "mesh": {"fsdp": 2}, "same_run": 2},
    "SAME RUN, ONE DEVICE": {"artifact_dir": _ARTIFACTS, "mesh": {"fsdp": 1}, "same_run": 2},
}


def check(source: str, traceback: bool = False) -> Outcome:
    """Run `source`, which defines `program(backend)`, on the backend "CPU", where a traced step is eager PyTorch, and
    on `TRACED`, and compare what it returns and what its module holds.

    Args:
        traceback: print where errors come from.
    """
    _PATH.write_text(source)
    linecache.checkcache(str(_PATH))
    try:
        eager = _run(source, "CPU")
    except Exception as error:
        if traceback:
            print_exc()
        return Outcome(DISCARDED, f"{type(error).__name__}: {_line(error)}", _user_line(error, source))
    try:
        traced = _run(source, TRACED)
        with _settled():
            compare(eager, traced, MODULE)
        if TRACED == "SAME RUN":
            two, one = (_run(source, name) for name in (TRACED, "SAME RUN, ONE DEVICE"))
            try:
                with _settled():
                    compare(one, two, MODULE, tolerance=0)
            except Difference as difference:
                return Outcome(DIFFERS, f"between one device and two: {_line(difference)}")
    except Difference as difference:
        if traceback:
            print_exc()
        if _overflows(eager):
            return Outcome(DISCARDED, "its loss overflows")
        if _sensitive(source, difference):
            return Outcome(DISCARDED, "it amplifies rounding errors")
        return Outcome(DIFFERS, _line(difference))
    except fl.errors.FirstlossError as error:
        if traceback:
            print_exc()
        return Outcome(REFUSED, f"{type(error).__name__}: {_line(error)}", _user_line(error, source))
    except Exception as error:
        if traceback:
            print_exc()
        return Outcome(FOREIGN, f"{type(error).__name__}: {_line(error)}", _user_line(error, source))
    finally:
        gc.collect()
    return Outcome(SAME)


def main(path: str) -> None:
    """Check the program in the file `path` and exit: 0 if both backends agree or it is refused, otherwise 1."""
    outcome = check(Path(path).read_text())
    print(f"{outcome.kind} {outcome.what} {outcome.where}".strip())
    raise SystemExit(outcome.failed)


def _run(source: str, name: str) -> dict[str, Any]:
    """The result of the program, and its module's variables afterwards."""
    module = types.ModuleType(MODULE)
    module.__file__ = str(_PATH)
    sys.modules[MODULE] = module
    with _settled():
        exec(compile(source, str(_PATH), "exec"), module.__dict__)
        backend = fl.backend("XLA", **_OPTIONS[name]) if name in _OPTIONS else fl.backend("CPU")
        with mock.patch.object(Backend, "replays", name == "GPU"), _soon_untraced(source):
            held = module.__dict__["program"](backend)
        if not isinstance(held, dict):
            held = {"returned": held}
        modes = {"default dtype": torch.get_default_dtype(), "grad mode": torch.is_grad_enabled()}
        holds = {k: v for k, v in module.__dict__.items() if not k.startswith("__")}
    return {**held, **modes, **holds}


@contextlib.contextmanager
def _soon_untraced(source: str) -> Iterator[None]:
    """Let steps that run by their Python have plain tensors at once, and half of the programs run so sooner: what a
    long run comes to is reached in a few calls."""
    with mock.patch.object(host_tensors, "_STEPS", 0):
        if zlib.crc32(source.encode()) % 2:
            with mock.patch.object(UntracedCalls, "begin", UntracedCalls.begin_at_once):
                yield
        else:
            yield


@contextlib.contextmanager
def _settled() -> Iterator[None]:
    """Start like a fresh process, and restore everything afterwards."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    environment, folder = dict(os.environ), os.getcwd()
    patched = [(cls, name, getattr(cls, name)) for cls, name in _PATCHED]
    hooks = [d for n, d in vars(torch.nn.modules.module).items() if n.startswith("_global_") and isinstance(d, dict)]
    optimizer_hooks = [
        d for n, d in vars(sys.modules["torch.optim.optimizer"]).items() if n.startswith("_global_optimizer")
    ]
    dtype = torch.get_default_dtype()
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        torch.set_autocast_enabled("cpu", False)
        torch.set_default_device(None)
        for cls, name, value in patched:
            setattr(cls, name, value)
        for registered in (*hooks, *optimizer_hooks):
            if isinstance(registered, dict):
                registered.clear()
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        for name in [name for name in sys.modules if name.startswith(f"{MODULE}_")]:
            del sys.modules[name]


def _overflows(held: dict[str, Any]) -> bool:
    """Whether eager PyTorch's losses end in infinity or NaN: which of the two depends on rounding."""
    losses = [loss for loss in held.get("losses", ()) if isinstance(loss, torch.Tensor) and loss.numel()]
    return any(not bool(torch.isfinite(loss.detach()).all()) for loss in losses)


class _Noise(TorchDispatchMode):
    """Errors of a few units in the last place in the results of reductions."""

    _SUMS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "sum", "mean", "var", "native_layer_norm", "exp", "tanh")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in ("addcdiv_", "_foreach_addcdiv_"):  # a weight update: bias corrections round differently
            for weight in args[0] if isinstance(args[0], (list, tuple)) else [args[0]]:
                noise = torch.rand(weight.shape, dtype=weight.dtype, generator=self.generator) * 2 - 1
                weight.mul_(1 + 8 * torch.finfo(weight.dtype).eps * noise)
        if name.endswith("_") or name.startswith("_foreach") or func.is_view:
            return result
        if not any(part in name for part in self._SUMS):
            return result

        def off(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                noise = torch.rand(value.shape, dtype=value.dtype, generator=self.generator) * 2 - 1
                return value * (1 + 8 * torch.finfo(value.dtype).eps * noise) + noise * torch.finfo(value.dtype).eps
            return value

        return pytree.tree_map(off, result)

    generator = torch.Generator().manual_seed(0)


def _sensitive(source: str, difference: Difference) -> bool:
    """Whether rounding errors make such a difference in PyTorch itself, as in the sign of a zero.

    Errors are random, and so are their effects: a fifth of the tolerance counts, in one of three runs.
    """
    for _ in range(3):
        try:
            eager = _run(source, "CPU")
            with _Noise():
                other = _run(source, "CPU")
            compare(eager, other, MODULE, tolerance=0.2)
        except Difference as other_difference:
            if difference.of_values or not other_difference.of_values:
                return True
        except Exception:
            return False
    return False


def _line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0].replace(f"{_folder.name}/", "")[:300]


def _user_line(error: BaseException, source: str) -> str:
    """The line of the program named in the error message, or ""."""
    match = re.search(rf"{MODULE}\.py(?:\", line |:)(\d+)", str(error))
    if match is None:
        return ""
    number = int(match[1])
    lines = source.splitlines()
    return f"line {number}: {lines[number - 1].strip()}" if 0 < number <= len(lines) else f"line {number}"
