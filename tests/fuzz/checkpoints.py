"""Random checkpoints and faults: loading gives the saved values or one of Firstloss's errors.

`generate(seed)` is a program's text: what is saved first and later, under which name, and what then happens to the
files: bits flipped, files truncated, emptied, removed, swapped or extended, names changed within them; or the saving
process is killed. `check(source)` saves, damages and loads: no other values than those saved are ever loaded, and no
save loses the previous checkpoint.

Kills are deterministic: before each call that changes a file, the folder is copied as a kill at that moment would leave
it.
"""

# ruff: noqa: E501 (templates, a line each)
from __future__ import annotations

import contextlib
import linecache
import math
import os
import random
import re
import shutil
import tempfile
import traceback as tracebacks
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import firstloss as fl

from .outcome import DIFFERS, DISCARDED, FOREIGN, REFUSED, SAME, Outcome

__all__ = ["check", "generate"]

_TENSORS = [
    "torch.arange({n}.0)", "torch.randn({n}, 3)", "torch.randn({n}, 3).t()", "torch.zeros(0, {n})", "torch.tensor({n})",
    "torch.ones({n}, dtype=torch.bfloat16)", "torch.arange({n}) % 3 == 0", "torch.randn({n}, dtype=torch.complex64).conj()",
    "torch.randn({n}, dtype=torch.complex64).conj().imag", "torch.tensor([1 + 2j]).conj().imag", "torch.randn({n})[::2]",
    "torch.randn(1).expand({n})", "torch.randn(4, {n})[:, :1]", "torch.nn.Parameter(torch.randn({n}))", "torch.randn({n}, 30, 40)",
    "torch.randn({n}, dtype=torch.float64)", "torch.randn({n}).to(torch.float8_e4m3fn)", "torch.arange({n}, dtype=torch.uint8)",
    "torch.tensor(float('nan'))", "torch.full(({n},), -0.0)", "torch.randn(200, 200)", "torch.full((70_000,), 2.5)",
    "fl.deferred_init(lambda: torch.randn({n}))", "fl.deferred_init(torch.nn.Linear, {n}, 3).weight", "torch._neg_view(torch.randn({n}))",
    "torch.randn({n}, dtype=torch.float16).requires_grad_()", "torch.randn(2, 3, 1, {n}).to(memory_format=torch.channels_last)",
]  # fmt: skip
_VALUES = [
    "{n}", "-{n}", "2 ** 70", "0.1", "-0.0", "float('nan')", "float('-inf')", "1e-320", "'text'", "'\\u00e9\\u4e2d\\U0001f600'", "'$tensor'",
    "None", "True", "b'\\x00\\xff'", "1 + 2j", "complex('nan')", "torch.float16", "torch.device('cpu')", "torch.Size([2, {n}])", "{{1, 2, {n}}}", "frozenset(['a'])",
    "np.arange({n})", "np.float32(0.1)", "np.random.rand(3, 2).T", "np.zeros(())", "Counter('abca')", "np.array([True, False])", "np.int64({n})",
    "torch.nn.Linear({n}, 2).state_dict()", "torch.get_rng_state()", "torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1).state_dict()", "''", "()", "[]", "{{}}",
]  # fmt: skip
_KEYS = [
    "'a'", "'b'", "'weight'", "'a.b'", "'__metadata__'", "'format'", "'pt'", "'$dict'", "'$tensor'", "''", "'firstloss.crc32'", "'firstloss.parts'", "'a (2)'",
    "'\\u00e9'", "'a/b'", "'.'", "0", "1.5", "None", "(1, 'a')", "True", "'x' * 300", "'a\\nb'", "'a\"b'", "float('inf')", "b'k'", "'[0:1]'", "'tensor'",
]  # fmt: skip
_HEAD = """from collections import Counter, OrderedDict

import numpy as np
import torch

import firstloss as fl
"""


def _value(rng: random.Random, depth: int, flat: bool = False) -> str:
    if flat or rng.random() < 0.45:
        return rng.choice(_TENSORS).format(n=rng.choice([1, 2, 5, 17, 100]))
    kind = rng.random() if depth else 1
    if kind < 0.4:
        return _dict(rng, depth - 1)
    if kind < 0.6:
        items = ", ".join(_value(rng, depth - 1) for _ in range(rng.randrange(4)))
        return f"[{items}]" if rng.random() < 0.5 else f"tuple([{items}])"
    if kind < 0.7:
        return f"OrderedDict({_dict(rng, depth - 1)})"
    return rng.choice(_VALUES).format(n=rng.choice([0, 1, 3, 12]))


def _dict(rng: random.Random, depth: int, flat: bool = False) -> str:
    keys = dict.fromkeys(rng.choice(_KEYS) for _ in range(rng.randrange(1, 6)))
    if flat:
        keys = {key: None for key in keys if key[0] == "'"} or {"'a'": None}
    return "{" + ", ".join(f"{key}: {_value(rng, depth, flat)}" for key in keys) + "}"


_HARM = [
    "flip",
    "flip",
    "flip",
    "flip",
    "cut",
    "cut",
    "empty",
    "remove",
    "longer",
    "zeros",
    "exchange",
    "rename key",
    "text",
    "older",
]


def generate(seed: int) -> str:
    """The program of `seed`, always the same text."""
    rng = random.Random(f"checkpoints {seed}")
    name = rng.choice(["it"] * 6 + ["it.safetensors"] * 2 + ["it.pt", "it.bin"])
    flat = name.endswith(".safetensors") or rng.random() < 0.3
    make = (lambda: _dict(rng, 0, True)) if flat else (lambda: _value(rng, 3) if rng.random() < 0.1 else _dict(rng, 3))
    lines = [_HEAD, f"SEED = {seed}", f"NAME = {name!r}", "HARMS = ["]
    harms = (
        []
        if rng.random() < 0.1
        else [(rng.choice(_HARM), rng.random(), rng.random()) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    )
    kills = [rng.random() for _ in range(6)] if rng.random() < 0.4 else []
    lines += [f"    {harm!r}," for harm in harms if not kills] + ["]", f"KILLS = {kills!r}", ""]
    shared = rng.random() < 0.3
    for which in ("before", "now"):
        body = ["    shared = torch.randn(300, 90)"] if shared else []
        body.append(f"    made = {make()}")
        if shared:
            body.append(
                "    if isinstance(made, dict):\n        made['s'], made['t'], made['part'] = shared, shared, shared[3:7]"
            )
        lines += [f"def {which}():", *body, "    return made", ""]
    return "\n".join(lines)


# -- damage to the files -----------------------------------------------------------------------------------------------


def _files(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path] if os.path.exists(path) else []
    return sorted(os.path.join(path, name) for name in os.listdir(path))


def _harm(path: str, older: str, kind: str, where: float, how: float) -> None:
    files = _files(path)
    if not files:
        return
    file = files[int(how * len(files))]
    with open(file, "rb") as opened:
        data = bytearray(opened.read())
    # Headers are small and every byte matters: half of all damage goes there.
    at = int(where * 2 * min(len(data), 600)) if where < 0.5 else int((where * 2 - 1) * len(data))
    at = min(at, max(len(data) - 1, 0))
    if kind == "remove":
        os.unlink(file)
        return
    if kind == "older":
        others = _files(older)
        data = bytearray(open(others[int(where * len(others))], "rb").read()) if others else data
    elif kind == "exchange":
        data = bytearray(open(files[int(where * len(files))], "rb").read())
    elif kind == "flip" and data:
        data[at] ^= 1 << int(how * 997) % 8
    elif kind == "cut":
        del data[at:]
    elif kind == "empty":
        data.clear()
    elif kind == "longer":
        data += os.urandom(1 + int(how * 5000))
    elif kind == "zeros":
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    elif kind == "rename key":
        names = sorted(set(re.findall(rb'"([a-z_.]{1,12})"', bytes(data[:4000]))))
        if names:
            old = names[int(where * len(names))]
            data = bytearray(bytes(data).replace(b'"' + old + b'"', b'"' + bytes(reversed(old)) + b'"', 1))
    elif kind == "text":
        data = bytearray(b"hello\n")
    with open(file, "wb") as opened:
        opened.write(data)


_CHANGES = (
    "rename",
    "replace",
    "unlink",
    "remove",
    "fsync",
    "pwrite",
    "pwritev",
    "mkdir",
    "makedirs",
    "ftruncate",
    "truncate",
)


@contextlib.contextmanager
def _copied_before_each_change(folder: str, copies: str) -> Iterator[list[str]]:
    """Copies of `folder` in `copies`, as a kill before each change to it would have left it."""
    folders: list[str] = []

    def copying(original: Callable) -> Callable:
        def change(*args: Any, **kwargs: Any) -> Any:
            if len(folders) < 60:
                folders.append(os.path.join(copies, str(len(folders))))
                with contextlib.suppress(OSError, shutil.Error):
                    _copy(folder, folders[-1])
            return original(*args, **kwargs)

        return change

    originals = {name: getattr(os, name) for name in _CHANGES if hasattr(os, name)}
    os_mkdir, made_dirs = originals["mkdir"], originals["makedirs"]

    def _copy(source: str, target: str) -> None:
        made_dirs_of(target)
        for root, _, names in os.walk(source):
            inner = os.path.join(target, os.path.relpath(root, source))
            made_dirs_of(inner)
            for name in names:
                with open(os.path.join(root, name), "rb") as a, open(os.path.join(inner, name), "wb") as b:
                    b.write(a.read())

    def made_dirs_of(path: str) -> None:
        if not os.path.isdir(path):
            made_dirs_of(os.path.dirname(path))
            os_mkdir(path)

    del made_dirs
    for name, original in originals.items():
        setattr(os, name, copying(original))
    try:
        yield folders
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


# -- comparing ---------------------------------------------------------------------------------------------------------


def _plain(obj: Any) -> Any:
    """A plain copy of `obj` for comparison: equal means the same types, order and bits."""
    if isinstance(obj, torch.Tensor):
        value = obj.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        flat = torch.empty(value.shape, dtype=value.dtype).copy_(value).reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        return "tensor", str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(obj, np.ndarray):
        return "array", str(obj.dtype), obj.shape, np.ascontiguousarray(obj).tobytes()
    if isinstance(obj, (np.bool_, np.integer, np.floating)):
        return _plain(obj.item())
    if isinstance(obj, Single):
        return "dict", sorted(((_plain(key), _plain(value)) for key, value in obj.items()), key=repr)
    if isinstance(obj, dict):
        kind = "dict" if type(obj) is dict else type(obj).__name__
        return kind, [(_plain(key), _plain(value)) for key, value in obj.items()]
    if isinstance(obj, (list, tuple)):
        return type(obj).__name__, [_plain(item) for item in obj]
    if isinstance(obj, (set, frozenset)):
        return type(obj).__name__, sorted(map(repr, obj))
    if isinstance(obj, float):
        return "float", math.copysign(1, obj), repr(obj)
    return type(obj).__name__, repr(obj)


class Single(dict):
    """A dict saved to one safetensors file, which does not keep the order."""


def _load(path: str) -> Any:
    loaded = fl.load(path)
    return _plain(Single(loaded) if path.endswith(".safetensors") else loaded)


def _load_saved(path: str) -> Any:
    """Load what was saved and not damaged: no error is acceptable."""
    try:
        return _load(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check(source: str, traceback: bool = False) -> Outcome:
    """Save, damage and load."""
    name = "<checkpoint>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__name__": "checkpoint"}
    own, arrays = torch.get_rng_state(), np.random.get_state()
    folder = tempfile.mkdtemp()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(source, name, "exec"), scope)
            return _checked(scope, folder)
    except fl.errors.FirstlossError as error:
        return Outcome(REFUSED, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".replace(folder, ""))
    except Exception as error:
        if traceback:
            tracebacks.print_exc()
        where = next(
            (f for f in reversed(tracebacks.extract_tb(error.__traceback__)) if "firstloss" in f.filename), None
        )
        return Outcome(
            FOREIGN, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".replace(folder, ""), str(where)
        )
    finally:
        torch.set_rng_state(own)
        np.random.set_state(arrays)
        shutil.rmtree(folder)


def _checked(scope: dict[str, Any], folder: str) -> Outcome:
    def saved(which: str) -> Any:
        torch.manual_seed(scope["SEED"])
        np.random.seed(scope["SEED"])
        return scope[which]()

    try:
        before, now = saved("before"), saved("now")
        single = scope["NAME"].endswith(".safetensors")
        contents = (_plain(Single(saved(which)) if single else saved(which)) for which in ("before", "now"))
        wanted_before, wanted_now = contents
    except Exception as error:
        return Outcome(DISCARDED, f"{type(error).__name__}: {error}")
    home = os.path.join(folder, "home")
    os.mkdir(home)
    path, older = os.path.join(home, scope["NAME"]), os.path.join(folder, "older")
    fl.save(before, path)
    if (loaded := _load_saved(path)) != wanted_before:
        return Outcome(DIFFERS, f"not what was saved: {_part(wanted_before, loaded)}")
    (shutil.copytree if os.path.isdir(path) else shutil.copy)(path, older)
    with (
        _copied_before_each_change(home, os.path.join(folder, "kills"))
        if scope["KILLS"]
        else contextlib.nullcontext([]) as kills
    ):
        try:
            fl.save(now, path)
        except fl.errors.FirstlossError:
            wanted_now = wanted_before  # refused: the previous checkpoint is still there
    if (loaded := _load_saved(path)) != wanted_now:
        return Outcome(DIFFERS, f"not what was saved: {_part(wanted_now, loaded)}")
    for k in sorted({int(at * len(kills)) for at in scope["KILLS"]} if kills else ()):
        left = os.path.join(kills[k], scope["NAME"])
        if os.path.isdir(kills[k]) and _load_saved(left) not in (wanted_before, wanted_now):
            return Outcome(DIFFERS, f"killed before change {k}: neither the checkpoint before nor the new one")
    for kind, where, how in scope["HARMS"]:
        _harm(path, older, kind, where, how)
    if not scope["HARMS"]:
        return Outcome(SAME)
    loaded = _load(path)
    if loaded == wanted_now or _is_all_old(scope, loaded, wanted_before):
        return Outcome(SAME)
    return Outcome(DIFFERS, f"after {[h[0] for h in scope['HARMS']]}: {_part(wanted_now, loaded)}")


def _is_all_old(scope: dict[str, Any], loaded: Any, before: Any) -> bool:
    """A complete file was replaced by an older one, which is undetectable."""
    return loaded == before and any(harm[0] == "older" for harm in scope["HARMS"]) and "." in scope["NAME"]


def _part(wanted: Any, loaded: Any) -> str:
    """The first difference between the two, in short."""
    a, b = repr(wanted), repr(loaded)
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{a[max(at - 80, 0) : at + 60]} ... and found {b[max(at - 20, 0) : at + 60]}"
