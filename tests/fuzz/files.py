"""Damaged and malicious files: readers read them, or raise an error of Firstloss's, soon and in little memory.

`generate(seed)` is a program's text: a reader, and which of its files, numbered from 0, to try. `check(source)` makes
each file from a valid one, by changes of bytes, of values in its JSON and of its pickles, with checksums that are right
again in half of the cases, and reads it. Anything but an error of Firstloss's own is a fault, and so are code of a
file that runs, a second's work, and memory that grows.

PyTorch itself reads the metadata of distributed checkpoints, by unpickling, so there any error will do; but the
deferred model that they are loaded into must come up as constructed or as saved.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback as tracebacks
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from jax.experimental import serialize_executable

import firstloss as fl

from .outcome import CRASHED, DIFFERS, FOREIGN, HUNG, SAME, Outcome

PER_PROGRAM = 100
_SECONDS = 10  # a hundred times what the slowest valid file takes
_MORE_MEMORY = 1 << 30
_ran = False  # set by code in files

Files = dict[str, bytes]  # by name, in one folder


class Reader(NamedTuple):
    """A kind of file.

    Attributes:
        seeds: makes valid files.
        change: makes a file from them.
        read: reads what is at the given path.
        errors: what it may raise.
    """

    seeds: Callable[[], list[Files]]
    change: Callable[[random.Random, Files], Files]
    read: Callable[[Path], Any]
    errors: tuple[type[BaseException], ...] = (fl.errors.FirstlossError,)


def run_by_a_file(*_: Any, **__: Any) -> None:
    """What malicious files call."""
    global _ran
    _ran = True


# -- changes -----------------------------------------------------------------------------------------------------------

_NUMBERS = [0, 1, -1, 2, 7, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, float("nan")]
_TEXTS = ["", "a", "0", "F32", "I64", "F8_E4M3", "BOOL", "..", "../a", "/etc/passwd", "a\0b", "\ud800", "x" * 300]
_TEXTS += ["weight", "model.safetensors", "firstloss.crc32", "__metadata__", "{}", "[1]", "00000000", "$tensor", "nan"]
_OTHERS = [None, True, False, [], {}, [[]], [0], [1, 2], {"a": 1}, [None], ["a", "b"], {"": {}}]


_BRACKETS = {"lists": ("[", "]"), "objects": ('{"a":', "}")}
# Texts that stand for values which are too deep for Python's json to write
_NESTED = {f"{depth} {name}": (depth, *pair) for depth in (50, 900, 100_000) for name, pair in _BRACKETS.items()}


def _json_value(rng: random.Random, near: Any) -> Any:
    kind = rng.random()
    if type(near) is int and kind < 0.3:
        return near + rng.choice([-1, 1, 4, -near * 2, near, 1 << 32])
    if type(near) is str and near and kind < 0.3:
        at = rng.randrange(len(near))
        return near[:at] + rng.choice(["", "0", "\0", near[at:] * 2]) + near[at + 1 :]
    if kind > 0.97:
        return rng.choice(sorted(_NESTED))
    return copy.deepcopy(rng.choice(rng.choice([_NUMBERS, _TEXTS, _OTHERS])))


def _changed_json(rng: random.Random, value: Any) -> Any:
    """A deep copy of JSON data with one node changed, removed, doubled, exchanged or renamed."""
    root = [copy.deepcopy(value)]
    places: list[tuple[Any, Any]] = []

    def visit(container: Any, key: Any) -> None:
        places.append((container, key))
        inner = container[key]
        for inner_key in list(inner) if isinstance(inner, dict) else range(len(inner)) if type(inner) is list else ():
            visit(inner, inner_key)

    visit(root, 0)
    container, key = rng.choice(places)
    other, other_key = rng.choice(places)
    kind = rng.random()
    if kind < 0.55:
        container[key] = _json_value(rng, container[key])
    elif kind < 0.65 and container is not root:
        del container[key]
    elif kind < 0.75:
        container[key] = copy.deepcopy(other[other_key])
    elif kind < 0.85 and isinstance(container, dict):
        container[rng.choice([*_TEXTS, str(other_key)])] = container.pop(key)
    elif isinstance(container, list):
        container.insert(rng.randrange(len(container) + 1), copy.deepcopy(other[other_key]))
    else:
        container[rng.choice(_TEXTS)] = _json_value(rng, container[key])
    return root[0]


def _to_json(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"))
    for name, (depth, begin, end) in _NESTED.items():
        text = text.replace(f'"{name}"', begin * depth + "0" + end * depth)
    return text


def _changed_bytes(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        at = rng.randrange(len(out) + 1) if rng.random() < 0.5 else rng.randrange(min(len(out), 600) + 1)
        end = min(len(out), at + rng.choice([1, 1, 2, 8, 100]))
        kind = rng.randrange(8)
        if kind < 2 and out:
            out[min(at, len(out) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del out[at:end]
        elif kind == 3:
            out[at:at] = out[at:end]
        elif kind == 4:
            out[at:end] = rng.randbytes(end - at)
        elif kind == 5:
            out[at:end] = bytes([rng.choice([0, 255, 0x7F, 0x80])]) * (end - at)
        elif kind == 6:
            out[at:at] = rng.choice([b'"', b"{", b"}", b"[", b"]", b",", b"-", b"9" * 30, b"\xff\xfe", b"1e999", b"\n"])
        else:
            begin = rng.randrange(len(out) + 1)
            out[at:end] = out[begin : begin + 8]
    if rng.random() < 0.1:
        del out[rng.randrange(len(out) + 1) :]
    return bytes(out)


def _change_of_bytes(rng: random.Random, files: Files) -> Files:
    name = rng.choice(sorted(files))
    return {**files, name: _changed_bytes(rng, files[name])}


def _several(rng: random.Random, value: Any) -> Any:
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        value = _changed_json(rng, value)
    return value


# -- safetensors, and folders of them ----------------------------------------------------------------------------------


def _written(save: Callable[[str], Any], name: str) -> Files:
    """The files that `save` writes, to a path of the given name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        save(str(path))
        return {file.name: file.read_bytes() for file in (path.iterdir() if path.is_dir() else [path])}


def _weights() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(20_000.0).reshape(200, 100),
        "half": torch.ones(3, 4, dtype=torch.bfloat16),
        "ids": torch.arange(6),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(True),
    }


def _with_header(head: bytes, header: Any) -> bytes:
    text = _to_json(header).encode(errors="replace")
    mark = json.loads(head[8:]).get("__metadata__", {}).get("firstloss.head")
    if mark is not None:  # the checksum of a changed header is right again
        text = text.replace(f'"firstloss.head":"{mark}"'.encode(), b'"firstloss.head":"00000000"')
        whole = len(text).to_bytes(8, "little") + text
        text = text.replace(b'"firstloss.head":"00000000"', f'"firstloss.head":"{zlib.crc32(whole):08x}"'.encode())
    return len(text).to_bytes(8, "little") + text


def _change_of_header(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with a changed header, whose length and checksum are right."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header.get("__metadata__", {})
    inner = [key for key in ("firstloss.parts", "firstloss.crc32") if key in metadata]
    if inner and rng.random() < 0.4:  # JSON within JSON
        key = rng.choice(inner)
        metadata[key] = _to_json(_several(rng, json.loads(metadata[key])))
    else:
        header = _several(rng, header)
    return _with_header(data[:end], header) + data[end:]


def _change_of_safetensors(rng: random.Random, files: Files) -> Files:
    name = rng.choice(sorted(name for name in files if name.endswith(".safetensors")))
    out = {**files, name: _change_of_header(rng, files[name])} if rng.random() < 0.6 else files
    return out if out is not files and rng.random() < 0.8 else _change_of_bytes(rng, out)


def _safetensors() -> list[Files]:
    import safetensors.torch

    weights = _weights()
    return [
        _written(lambda path: safetensors.torch.save_file(weights, path), "it.safetensors"),
        _written(lambda path: fl.save(weights, path), "it.safetensors"),
        _written(lambda path: fl.save({**weights, "tied": weights["weight"]}, path), "it.safetensors"),
    ]


def _hub_folders() -> list[Files]:
    weights = _weights()
    parts = ({"weight": weights.pop("weight")}, weights)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    out: Files = {}
    for name, part in zip(names, parts, strict=True):
        out |= _written(lambda path, part=part: fl.save(part, path), name)
    where = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    out["model.safetensors.index.json"] = json.dumps({"metadata": {"total_size": 1}, "weight_map": where}).encode()
    binary = {key.replace("safetensors", "bin"): value for key, value in out.items() if key.endswith(".json")}
    return [out, {name: content for name, content in out.items() if name[-5:] != ".json"} | binary]


def _change_of_hub_folder(rng: random.Random, files: Files) -> Files:
    index = next(name for name in files if name.endswith(".json"))
    if rng.random() < 0.6:
        files = {**files, index: _to_json(_several(rng, json.loads(files[index]))).encode(errors="replace")}
        return files if rng.random() < 0.8 else _change_of_bytes(rng, files)
    return _change_of_safetensors(rng, files)


def _folders() -> list[Files]:
    module = torch.nn.Linear(3, 200)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    run = {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 3,
        "kinds": [1.5, None, (1, b"a")],
    }
    run |= {"more": [1 + 2j, torch.float16, torch.device("cpu"), {1: 2}, {1, 2}, float("nan"), torch.get_rng_state()]}
    return [_written(lambda path: fl.save(run, path), "it"), _written(lambda path: fl.save(_weights(), path), "it")]


def _change_of_folder(rng: random.Random, files: Files) -> Files:
    index = "checkpoint.json"
    content = json.loads(files[index])
    changed = rng.random() < 0.5
    if not changed:
        files = _change_of_safetensors(rng, files)
    if rng.random() < 0.7:  # the index fits the files again
        with contextlib.suppress(KeyError, TypeError):
            for about in content["files"]:
                data = files[about["name"]]
                about["size"] = len(data)
                about["head"] = zlib.crc32(data[: 8 + int.from_bytes(data[:8], "little")])
    content = _several(rng, content) if changed else content
    if isinstance(content, dict) and "crc32" in content and rng.random() < 0.9:
        content = dict(content)
        del content["crc32"]
        if not any(name in json.dumps(content) for name in _NESTED):
            content["crc32"] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    files = {**files, index: _to_json(content).encode(errors="replace")}
    return files if rng.random() < 0.85 else _change_of_bytes(rng, files)


def _load(path: Path) -> None:
    """Read everything at `path`: a file, if the folder has only one."""
    names = os.listdir(path)
    fl.load(path / names[0] if len(names) == 1 else path, map_location="cpu")


# -- torch.save --------------------------------------------------------------------------------------------------------


class _Malicious:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._reduced = function, args

    def __reduce__(self) -> Any:
        return self._reduced


def _torch_files() -> list[Files]:
    tensors = {
        **_weights(),
        "view": torch.arange(30_000.0)[7:20_007].reshape(100, 200).t(),
        "nested": {"a": [1, (2.5, None)]},
    }
    tensors["conj"] = torch.ones(3, dtype=torch.complex64).conj()
    evil = [
        _Malicious(run_by_a_file),
        _Malicious(exec, "import tests.fuzz.files as f; f.run_by_a_file()"),
        {1: _Malicious(os.getcwd)},
    ]
    out = [_written(lambda path: torch.save(tensors, path), "it.pt")]
    out.append(_written(lambda path: torch.save(torch.nn.Linear(2, 3).state_dict(), path), "it.pt"))
    out.append(_written(lambda path: torch.save(tensors, path, _use_new_zipfile_serialization=False), "it.pt"))
    out += [_written(functools.partial(torch.save, each), "it.pt") for each in evil]
    out += [{"it.pt": pickle.dumps(each)} for each in evil]
    return out  # fmt: skip


def _change_of_torch_file(rng: random.Random, files: Files) -> Files:
    ((name, data),) = files.items()
    kind = rng.random()
    if data[:2] != b"PK" or kind < 0.3:
        return {name: data} if kind < 0.02 else {name: _changed_bytes(rng, data)}
    # Change a member, with the zip's own checksums right.
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as written:
        members = archive.namelist()
        target = next(m for m in members if m.endswith("data.pkl")) if kind < 0.8 else rng.choice(members)
        for member in members:
            content = archive.read(member)
            if member == target:
                content = _changed_bytes(rng, content)
                if rng.random() < 0.05:
                    continue
            compress = zipfile.ZIP_DEFLATED if rng.random() < 0.02 else zipfile.ZIP_STORED
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                written.writestr(
                    zipfile.ZipInfo(member if rng.random() > 0.01 else rng.choice(members)), content, compress
                )
    return {name: out.getvalue()}  # fmt: skip


# -- distributed checkpoints -------------------------------------------------------------------------------------------


def _net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 2))


@functools.cache
def _saved_net() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 0.25) for name, tensor in _net().state_dict().items()}


def _distributed_checkpoints() -> list[Files]:
    return [_written(lambda path: dcp.save(dict(_saved_net()), checkpoint_id=path), "it")]


def _load_distributed(path: Path) -> None:
    module = fl.deferred_init(_net)
    state = module.state_dict()
    try:
        dcp.load(state, checkpoint_id=path)
        module.load_state_dict(state)
    finally:
        made = _net().state_dict()
        for name, tensor in fl.materialize_module(module).state_dict().items():
            # The values themselves may be damaged: PyTorch's format has no checksums.
            if tensor.shape != made[name].shape or tensor.dtype != made[name].dtype:
                raise AssertionError(f"{name} is neither constructed nor loaded") from None


# -- run files, configs, modules, executables --------------------------------------------------------------------------

_RUN = """\
trainer:
  device: CPU
  model_dir: run
  seed: 0
  model: {class_path: torch.nn.Linear, init_args: {in_features: 3, out_features: 4}}
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
  schedulers:
    class_path: firstloss.optim.lr_scheduler.LinearLR
    init_args: {initial_learning_rate: 0.1, end_learning_rate: 0.0, total_iters: 4}
  loop: {max_steps: 4}
  callbacks:
  - {class_path: firstloss.trainer.EarlyStop, init_args: &first {patience: 2}}
  - {class_path: firstloss.trainer.EarlyStop, init_args: *first}
ckpt_path: last
"""
_ZOO = """\
trainer:
  init:
    model_dir: run
    model: {name: torch.nn.Linear, in_features: 3, out_features: 4}
    optimizer: {AdamW: {learning_rate: 0.1, weight_decay: 0.1}}
    schedulers:
    - SequentialLR:
        schedulers:
        - LinearLR: {initial_learning_rate: 0.0, end_learning_rate: 0.1, total_iters: 2}
        - CosineDecayLR: {initial_learning_rate: 0.1, end_learning_rate: 0.0, total_iters: 8}
    loop: {max_steps: 4, eval_steps: 2}
    checkpoint: {steps: 2}
    logging: {log_steps: 1}
    seed: 1
    callbacks: [{CheckLoss: {}}]
  fit: {train_dataloader: {data_processor: torch.utils.data.DataLoader, dataset: [1, 2]}}
"""
_EVIL_YAML = [
    "!!python/object/apply:tests.fuzz.files.run_by_a_file []\n",
    "trainer: !!python/object/new:tests.fuzz.files.run_by_a_file {}\n",
    "a: &a [1]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in itertools.pairwise("abcdefghi")),
    "a: &a\n  b: *a\n", "&a [*a]\n", "[" * 5000, "{a: " * 5000, "? " * 3000, "- " * 5000, "a: " + "9" * 100_000 + "\n",
    "<<: *a\n", "!!binary |\n  R0lG\n", "a: 1_0_0:59:59\n", "a: !!timestamp 9999999-99-99\n", "a: !!int 0x\n",
    "? [a]\n: 1\n", "? {a: 1}\n: 1\n", "trainer: {init: }\n", "---\n---\n", "%YAML 9.9\n---\na\n",
]  # fmt: skip


def _run_files() -> list[Files]:
    return [{"it.yaml": text.encode()} for text in (*[_RUN] * 8, *[_ZOO] * 4, *_EVIL_YAML)]


def _change_of_yaml(rng: random.Random, files: Files) -> Files:
    import yaml

    ((name, data),) = files.items()
    if data.decode() in _EVIL_YAML:
        return files if rng.random() < 0.2 else _change_of_bytes(rng, files)
    if rng.random() < 0.6:
        value = _several(rng, yaml.safe_load(data))
        return {name: _to_json(value).encode(errors="replace")}  # which is YAML, too
    return _change_of_bytes(rng, files)


def _read_run_file(path: Path) -> None:
    from firstloss.cli import config

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        phases = config.read_model_zoo(str(path / "it.yaml"), [])
        if phases is not None:
            list(phases)
        else:
            config.read("fit", str(path / "it.yaml"), [])


def _configs() -> list[Files]:
    tiny = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    llama = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        **tiny,
    }
    bert = {"model_type": "bert", "architectures": ["BertModel"], "id2label": {"0": "a"}, **tiny}
    remote = {**llama, "auto_map": {"AutoConfig": "tests.fuzz.files--run_by_a_file", "AutoModel": "evil.run_by_a_file"}}
    return [{"config.json": json.dumps(each).encode()} for each in (llama, bert, remote)]  # fmt: skip


def _change_of_config(rng: random.Random, files: Files) -> Files:
    if rng.random() < 0.3:
        return _change_of_bytes(rng, files)
    return {"config.json": _to_json(_several(rng, json.loads(files["config.json"]))).encode(errors="replace")}


def _read_config(path: Path) -> None:
    from firstloss.cli import target

    target.load(str(path / "config.json"), [])


def _modules() -> list[Files]:
    def make() -> torch.nn.Module:
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
        torch.nn.init.trunc_normal_(module[0].weight)
        return module

    program = fl.init_program(fl.deferred_init(make))
    texts = [program.to_stablehlo(), program.to_stablehlo(mesh={"fsdp": 1})]
    return [{"it.mlir": text.encode()} for text in texts]


def _change_of_module(rng: random.Random, files: Files) -> Files:
    data = files["it.mlir"]
    if rng.random() < 0.5:  # whole words and lines
        lines = data.split(b"\n")
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(len(lines))
            kind = rng.random()
            if kind < 0.25:
                del lines[at]
            elif kind < 0.5:
                lines.insert(at, rng.choice(lines))
            else:
                words = lines[at].split(b" ")
                words[rng.randrange(len(words))] = rng.choice(rng.choice(lines).split(b" "))
                lines[at] = b" ".join(words)
            if not lines:
                break
        data = b"\n".join(lines)
    else:
        data = _changed_bytes(rng, data)
    return {"it.mlir": data}


def _run_module(path: Path) -> None:
    fl.run_stablehlo(path / "it.mlir")


def _executables() -> list[Files]:
    import jax

    compiled = jax.jit(lambda x: x * 2 + 1).lower(jax.ShapeDtypeStruct((3,), "float32")).compile()
    evil = pickle.dumps(_Malicious(run_by_a_file))
    out = []
    for content in (pickle.dumps(serialize_executable.serialize(compiled)), evil):
        out.append({f"{'a' * 64}.executable": b"0" * 32 + content})
    out.append(_valid_executable(compiled))
    return out


def _change_of_executable(rng: random.Random, files: Files) -> Files:
    changed = files
    while changed == files:
        changed = _change_of_bytes(rng, files)
    return changed


def _valid_executable(compiled: Any) -> Files:
    from firstloss.runtime.step.executable_cache import Entry

    with tempfile.TemporaryDirectory() as folder:
        entry = Entry(Path(folder), "b" * 64)
        entry._store(compiled)
        return {entry.path.name: entry.path.read_bytes()}


def _read_executable(path: Path) -> None:
    from firstloss.runtime.step.executable_cache import Entry

    (name,) = os.listdir(path)
    os.chmod(path / name, 0o600)
    loaded = Entry(path, name.removesuffix(".executable")).load()
    if loaded is not None:
        raise AssertionError("a damaged executable was loaded")


READERS = {
    "safetensors": Reader(_safetensors, _change_of_safetensors, _load),
    "hub_folder": Reader(_hub_folders, _change_of_hub_folder, _load),
    "folder": Reader(_folders, _change_of_folder, _load),
    "torch": Reader(_torch_files, _change_of_torch_file, _load),
    "distributed": Reader(
        _distributed_checkpoints, _change_of_bytes, _load_distributed, (Exception, dcp.CheckpointException)
    ),
    "run_file": Reader(_run_files, _change_of_yaml, _read_run_file),
    "config": Reader(_configs, _change_of_config, _read_config),
    "module": Reader(_modules, _change_of_module, _run_module),
    "executable": Reader(_executables, _change_of_executable, _read_executable),
}
_seeds = functools.cache(lambda name: READERS[name].seeds())


def generate(seed: int) -> str:
    """The program of `seed`: readers take turns."""
    names = sorted(READERS)
    first = seed // len(names) * PER_PROGRAM
    name = names[seed % len(names)]
    return f'"""seed {seed}: {name}."""\nREADER = {name!r}\nFIRST, COUNT = {first}, {PER_PROGRAM}\n'


def file_of(name: str, number: int) -> Files:
    """The files with this number of a reader."""
    rng = random.Random(f"{name} {number}")
    return READERS[name].change(rng, rng.choice(_seeds(name)))


class _TooLong(BaseException):
    pass


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Raise _TooLong in Python code that takes too long, and MemoryError in any that allocates too much."""

    def stop(*_: Any) -> None:
        raise _TooLong

    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * _MORE_MEMORY, limits[1]))
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def check(source: str, traceback: bool = False) -> Outcome:
    """Read the files of a program; the first fault is the outcome."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    for number in range(scope["FIRST"], scope["FIRST"] + scope["COUNT"]):
        outcome = check_file(scope["READER"], number, traceback)
        if outcome.failed:
            return outcome
    return Outcome(SAME)


def check_file(name: str, number: int, traceback: bool = False) -> Outcome:
    """Read one."""
    global _ran
    _ran = False
    reader, where = READERS[name], f"{name} {number}"
    files = file_of(name, number)
    folder = Path(tempfile.mkdtemp())
    peak, began, here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter(), os.getcwd()
    try:
        for file, content in files.items():
            (folder / file).write_bytes(content)
        os.chdir(folder)
        with warnings.catch_warnings(), _bounded():
            warnings.simplefilter("ignore")
            try:
                reader.read(folder)
            except reader.errors as error:
                if isinstance(error, MemoryError) and type(error) is MemoryError:
                    raise
    except _TooLong:
        return Outcome(HUNG, f"took more than {_SECONDS} s", where)
    except AssertionError as error:
        return Outcome(DIFFERS, str(error), where)
    except Exception as error:
        if traceback:
            tracebacks.print_exc()
        return Outcome(FOREIGN, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", where)
    finally:
        os.chdir(here)
        shutil.rmtree(folder)
    if _ran:
        return Outcome(DIFFERS, "code in the file was run", where)
    if time.perf_counter() - began > _SECONDS:
        return Outcome(HUNG, f"took {time.perf_counter() - began:.1f} s", where)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    if more > _MORE_MEMORY:
        return Outcome(CRASHED, f"took {more / 1e9:.1f} GB", where)
    return Outcome(SAME)
