"""`firstloss.save` and `firstloss.load`: atomic checkpoints.

A checkpoint is a folder: `checkpoint.json` has the object's structure and the names of the files with its tensors, one
safetensors file with checksums for each process. A new folder is written under a temporary name and renamed when it is
complete. In an existing folder new files are written beside the old ones, `checkpoint.json` is replaced atomically, and
the old files are removed. So a process may be killed at any time: the checkpoint is either the new or the previous one.
"""

from __future__ import annotations

import json
import os
import re
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ... import timeline
from ...compat.torch_names import InferenceMode, pytree
from ...errors import CheckpointError, CheckpointMissingError, SaveError, UnsavableError
from ...files import atomic_write, exists, is_folder, is_of_the_system, locked, remove_folder, replacing, sync_folder
from ...init.materialize_module import materialize_tensor
from ..mesh.processes import Processes, processes
from . import foreign
from .file import RESERVED, TensorFile, write
from .sources import Sources, on_host
from .tensors import Tensors
from .tree import Encoder, decode
from .untrusted import as_part_of, damage_as_errors, parse

INDEX = "checkpoint.json"
_FORMAT = "firstloss checkpoint 1"
_DATA = re.compile(r"tensors-[0-9a-f]{12}-\d{5}\.safetensors")
_TORCH = (".pt", ".pth", ".bin")


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Write `obj` to `path`: the state of a training run, or a part of it.

    Tensors are written one after another: host memory holds at most one copy of a device tensor. Tensors that share
    memory are stored once. If the process is killed, `path` is unchanged. Several processes must all call this with the
    same objects; each writes the shards that it owns, so `path` must be on a shared file system.

    Examples:
        >>> model = nn.Linear(8, 4)
        >>> fl.save({"model": model.state_dict(), "step": 3}, "checkpoint")
        >>> fl.load("checkpoint")["step"]
        3

    Args:
        obj: tensors, numbers, strings, None and NumPy arrays in nested dicts, lists and tuples: state dicts of modules,
            optimizers, schedulers, loaders and backends, `torch.get_rng_state()`.
        path: a folder, created if it does not exist. With the suffix `.safetensors` a file of that format (for a flat
            dict of tensors only), with `.pt`, `.pth` or `.bin` one for `torch.load`; both are written by process 0. A
            folder with a flat dict of tensors, such as a module's state dict, is readable by Hugging Face libraries.

    Raises:
        UnsavableError: if the object contains anything else; the error names its path in the object.
        SaveError: if the files cannot be written, or another process is writing there.
    """
    target = os.path.abspath(os.fspath(path))
    with timeline.span("save"), InferenceMode(False), _errors_as_save_errors(target):
        if target.endswith(_TORCH):
            if processes().index == 0:
                _save_for_torch(obj, target)
            return
        sources = Sources()
        tree = Encoder(sources.store).encode(obj)
        if target.endswith(".safetensors"):
            _save_single(tree, sources, target)
        else:
            _save_folder(tree, sources, target, processes())


def load(path: str | os.PathLike[str], map_location: str | torch.device | None = None) -> Any:
    """Load what was saved at `path`; tensors are read when they are used.

    Large tensors stay on disk until an operation needs them. `load_state_dict` of a model that is deferred or on a
    backend reads them directly to their destination. Checksums are verified when a tensor is read. Small tensors are
    read at once. The files may be replaced meanwhile: what was loaded stays readable.

    Examples:
        >>> model = nn.Linear(8, 4)
        >>> fl.save(model.state_dict(), "weights")
        >>> again = fl.deferred_init(nn.Linear, 8, 4)
        >>> again.load_state_dict(fl.load("weights"))  # nothing is drawn
        <All keys matched successfully>
        >>> torch.equal(again.weight, model.weight)
        True

    Args:
        path: written by `save` or `save_initialized`; or a safetensors file, a Hugging Face folder, or a file of
            `torch.save`, of which only data is loaded: no code in it is ever run.
        map_location: by default as described. A device such as "cpu": read all tensors now and move them there; "meta":
            read none of them, only shapes and dtypes.

    Returns:
        The object that was passed to `save`: tensors in the same dicts, lists and tuples.

    Raises:
        CheckpointError: for another `map_location`.
        CheckpointMissingError: if there is no complete checkpoint at `path`.
        CheckpointError: if it is damaged or of an unknown format; names the file and the tensor. Damage within a
            tensor is found when that is read.
    """
    if map_location is not None:
        return _on_device(load(path), map_location)
    target = os.path.abspath(os.fspath(path))
    with timeline.span("load"), InferenceMode(False):
        if not is_folder(target):
            return foreign.load_file(target)
        if exists(os.path.join(target, INDEX)):
            return _load_folder(target)
        if any(map(_DATA.fullmatch, os.listdir(target))):
            raise CheckpointMissingError(
                f"{os.path.join(target, INDEX)} is missing: the folder has a checkpoint's tensors, but not the index "
                "that describes them"
            )
        return foreign.load_folder(target)


def _on_device(loaded: Any, map_location: Any) -> Any:
    if not isinstance(map_location, (str, torch.device)):
        raise CheckpointError(
            f"map_location={map_location!r}: pass a device or its name. To put tensors on several devices, load "
            "without it, which reads nothing yet, and move each."
        )
    try:
        device = torch.device(map_location)
    except RuntimeError as error:
        raise CheckpointError(f"map_location={map_location!r} is not a device: {error}") from None

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if device.type == "meta":
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return materialize_tensor(tensor).to(device)

    return pytree.tree_map_only(torch.Tensor, move, loaded)


# -- folders -----------------------------------------------------------------------------------------------------------


def _save_folder(tree: Any, sources: Sources, target: str, group: Processes) -> None:
    number = group.agree(uuid.uuid4().hex[:12])
    with _folder(target, number, group) as folder:
        names = [f"tensors-{number}-{k:05d}.safetensors" for k in range(group.count)]
        write(os.path.join(folder, names[group.index]), sources.owned_by(group.index))
        group.wait("written")
        if group.index == 0:
            files = [_description(os.path.join(folder, name)) for name in names]
            content = {"format": _FORMAT, "files": files, "object": tree}
            _write_json(os.path.join(folder, INDEX), {**content, "crc32": _checksum(content)})
            _write_hub_index(folder, tree, files)


@contextmanager
def _folder(target: str, number: str, group: Processes) -> Iterator[str]:
    """Yield the folder to write to; at the end of the block it becomes the checkpoint `target`."""
    new = group.agree(str(int(not is_folder(target)))) == "1"
    parent, name = os.path.split(target)
    folder = os.path.join(parent, f".{name}.{number}.part") if new else target
    if group.index == 0:
        os.makedirs(folder, exist_ok=True)
    group.wait("folder")
    if group.index != 0:
        yield folder
        group.wait("named")
        return
    with locked(folder):
        yield folder
        sync_folder(folder)
        if new:
            os.rename(folder, target)
            sync_folder(parent)
        _remove_leftovers(target)
    group.wait("named")


def _remove_leftovers(target: str) -> None:
    """Remove files of the previous checkpoint, and of saves that were killed."""
    with open(os.path.join(target, INDEX), encoding="utf-8") as file:
        current = {about["name"] for about in json.load(file)["files"]}
    for name in os.listdir(target):
        if _DATA.fullmatch(name) and name not in current or re.fullmatch(r"\..*\.json\.[0-9a-f]{12}\.part", name):
            os.unlink(os.path.join(target, name))
    parent, own = os.path.split(target)
    for name in os.listdir(parent):
        if re.fullmatch(rf"\.{re.escape(own)}\.[0-9a-f]{{12}}\.part", name):
            try:
                with locked(os.path.join(parent, name)):
                    remove_folder(os.path.join(parent, name))
            except (SaveError, FileNotFoundError):
                continue  # another process is writing it


def _description(path: str) -> dict[str, Any]:
    head = TensorFile(path).head
    return {"name": os.path.basename(path), "size": os.path.getsize(path), "head": zlib.crc32(head)}


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _write_json(path: str, content: Any) -> None:
    with atomic_write(path, "w") as file:
        json.dump(content, file)
        file.write("\n")


def _flat(tree: Any) -> dict[str, Any] | None:
    """The items of an encoded dict with string keys; None for anything else."""
    pairs = tree.get("$state_dict", [tree])[0] if isinstance(tree, dict) else None
    if isinstance(pairs, dict) and "$ordered" in pairs:
        pairs = pairs["$ordered"]
        return dict(pairs) if all(isinstance(key, str) for key, _ in pairs) else None
    return pairs


def _write_hub_index(folder: str, tree: Any, files: list[dict[str, Any]]) -> None:
    """Write the index with which Hugging Face libraries find the tensors of a flat dict."""
    path = os.path.join(folder, foreign.HUB_INDEX)
    flat = _flat(tree) or {}
    open_files = [TensorFile(os.path.join(folder, about["name"])) for about in files]
    named = {v.get("$tensor") if isinstance(v, dict) else None: k for k, v in flat.items()}
    if not flat or None in named or any(name not in flat for name in named) or any(f.parts for f in open_files):
        if exists(path):  # from an earlier save of another object
            os.unlink(path)
        return
    where = {key: os.path.basename(file.path) for file in open_files for key in file.entries}
    size = sum(entry.end - entry.begin for file in open_files for entry in file.entries.values())
    _write_json(path, {"metadata": {"total_size": size}, "weight_map": where})


def _load_folder(target: str) -> Any:
    path = os.path.join(target, INDEX)
    with open(path, "rb") as file, damage_as_errors(path):
        content = parse(file.read())
        stored = content.pop("crc32")
        if content["format"] != _FORMAT:
            raise CheckpointError(f"{path} is of format {content['format']!r:.80}; this version reads {_FORMAT!r}")
        if stored != _checksum(content):
            raise CheckpointError(f"{path} is damaged: its checksum does not match")
        tensors = Tensors([_file_of(path, **about) for about in content["files"]])
        try:
            return decode(content["object"], tensors.get)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


def _file_of(index: str, name: str, size: int, head: int) -> TensorFile:
    """One of the files that the index describes."""
    with as_part_of(index, name) as path:
        file = TensorFile(path)
    if file.size != size:
        raise CheckpointError(f"{path} has {file.size:,} bytes instead of {size}")
    if zlib.crc32(file.head) != head:
        raise CheckpointError(f"{path} is damaged: the checksum of its header does not match")
    return file


def _check_data(written: str, target: str) -> None:
    """Raise an error if a file of `torch.save` could not be loaded without running code; reads no tensor."""
    try:
        foreign.load_torch(written, lazily=True)
    except CheckpointError as error:
        raise UnsavableError(
            f"{target}: torch.save files must hold tensors, numbers, strings, None, and dicts, lists and tuples of "
            f"them. This object holds something that torch.load rejects ({error.__cause__ or error}). Save it in a "
            "folder: leave out the suffix."
        ) from error


def _save_for_torch(obj: Any, target: str) -> None:
    with replacing(target) as temporary:
        open(temporary, "xb").close()  # raises OSError, unlike PyTorch's writer
        try:
            # Not to a file object: an interrupted writer ends the process when it writes to one that has been closed.
            torch.save(on_host(obj), temporary)
        except RuntimeError as error:
            if not _is_of_the_writer(error):
                raise
            cause = error.__context__
            while cause is not None and _is_of_the_writer(cause):
                cause = cause.__context__
            if cause is not None:  # what a handler of a signal has raised
                raise cause from None
            raise SaveError(f"{target} cannot be written: the disk may be full ({error})") from error
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        _check_data(temporary, target)


def _is_of_the_writer(error: BaseException) -> bool:
    """Whether PyTorch's file writer has failed, which says nothing of the reason."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("inline_container", "iostream"))


# -- files -------------------------------------------------------------------------------------------------------------


def _save_single(tree: Any, sources: Sources, target: str) -> None:
    flat = _flat(tree)
    if flat is None or any(not isinstance(v, dict) or "$tensor" not in v for v in flat.values()):
        raise UnsavableError(
            f"{target}: a safetensors file holds one flat dict of tensors. Save this object in a folder: leave out the "
            "suffix '.safetensors'."
        )
    if processes().index != 0:
        return
    ties = {name: value["$tensor"] for name, value in flat.items() if value["$tensor"] != name}
    for name, stored in ties.items():
        if stored not in flat or name in RESERVED:
            raise UnsavableError(
                f"{target}: a safetensors file cannot hold a tensor with the name {name!r}. Rename it, or save in a "
                "folder: leave out the suffix '.safetensors'."
            )
    with replacing(target) as temporary:
        write(temporary, sources.whole(), ties)


@contextmanager
def _errors_as_save_errors(target: str) -> Iterator[None]:
    try:
        yield
    except (SaveError, CheckpointMissingError):
        raise
    except OSError as error:
        if not is_of_the_system(error):
            raise
        raise SaveError(f"{error.filename or target} cannot be written: {error.strerror or error}") from error
