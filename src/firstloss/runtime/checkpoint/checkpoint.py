"""`firstloss.save` and `firstloss.load`: atomic checkpoints.

A checkpoint is a folder: `checkpoint.json` has the structure of the object and the names of the files with its tensors,
which are safetensors with checksums, one for each process. A new folder is written under a temporary name and renamed
when it is complete. In an existing folder new files are written beside the old ones, `checkpoint.json` is replaced
atomically, and the old ones are removed. So a process may be killed at any time: the checkpoint is the new one or the
previous one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ... import timeline
from ...compat.torch_names import pytree
from ...errors import CheckpointError, CheckpointMissingError, SaveError, UnsavableError
from ...files import atomic_write, locked, placed, sync_folder
from ...init.materialize_module import materialize_tensor
from ..mesh.processes import Processes, processes
from . import foreign
from .file import RESERVED, TensorFile, write
from .sources import Sources, on_host
from .tensors import Tensors
from .tree import Encoder, decode

INDEX = "checkpoint.json"
_FORMAT = "firstloss checkpoint 1"
_DATA = re.compile(r"tensors-[0-9a-f]{12}-\d{5}\.safetensors")
_TORCH = (".pt", ".pth", ".bin")


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Write `obj` to `path`: the state of a training run, or a part of it.

    Tensors are written one after another: host memory holds at most one copy of a tensor that is on a device. Tensors
    that share memory are stored once. If the process is killed, `path` is unchanged. Several processes must all call
    this with the same objects; each writes the shards that it owns, so `path` must be on a shared file system.

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
        UnsavableError: if the object contains anything else; the error names where.
        SaveError: if the files cannot be written, or another process is writing there.
    """
    target = os.path.abspath(os.fspath(path))
    with timeline.span("save"), _explained(target):
        if target.endswith(_TORCH):
            if processes().index == 0:
                with atomic_write(target) as file:
                    torch.save(on_host(obj), file)
                    file.flush()
                    _check_data(file.name, target)
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
        map_location: None: as described. A device such as "cpu": all tensors are read now and moved there; "meta": none
            is read, they have shapes and dtypes only.

    Returns:
        The object that was given to `save`: tensors in the same dicts, lists and tuples.

    Raises:
        CheckpointError: for another `map_location`.
        CheckpointMissingError: if there is no complete checkpoint at `path`.
        CheckpointError: if it is damaged or of an unknown format, naming the file and the tensor. Damage within a
            tensor is found when that is read.
    """
    if map_location is not None:
        return _on_device(load(path), map_location)
    target = os.path.abspath(os.fspath(path))
    with timeline.span("load"):
        if not os.path.isdir(target):
            return foreign.load_file(target)
        if os.path.exists(os.path.join(target, INDEX)):
            return _load_folder(target)
        if any(map(_DATA.fullmatch, os.listdir(target))):
            raise CheckpointMissingError(
                f"{os.path.join(target, INDEX)} is missing: the tensors of a checkpoint are there, and what said how "
                "they belong together is not"
            )
        return foreign.load_folder(target)


def _on_device(loaded: Any, map_location: Any) -> Any:
    if not isinstance(map_location, (str, torch.device)):
        raise CheckpointError(
            f"map_location={map_location!r}: give a device, or its name. To put tensors in several places, load "
            "without it, which reads nothing yet, and move each."
        )
    try:
        device = torch.device(map_location)
    except RuntimeError as error:
        raise CheckpointError(f"map_location={map_location!r} is no device: {error}") from None

    def there(tensor: torch.Tensor) -> torch.Tensor:
        if device.type == "meta":
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return materialize_tensor(tensor).to(device)

    return pytree.tree_map_only(torch.Tensor, there, loaded)


# -- a folder ----------------------------------------------------------------------------------------------------------


def _save_folder(tree: Any, sources: Sources, target: str, all_of_us: Processes) -> None:
    number = all_of_us.agree(uuid.uuid4().hex[:12])
    with _folder(target, number, all_of_us) as folder:
        names = [f"tensors-{number}-{k:05d}.safetensors" for k in range(all_of_us.count)]
        write(os.path.join(folder, names[all_of_us.index]), sources.owned_by(all_of_us.index))
        all_of_us.wait("written")
        if all_of_us.index == 0:
            files = [_description(os.path.join(folder, name)) for name in names]
            content = {"format": _FORMAT, "files": files, "object": tree}
            _write_json(os.path.join(folder, INDEX), {**content, "crc32": _checksum(content)})
            _write_hub_index(folder, tree, files)


@contextmanager
def _folder(target: str, number: str, all_of_us: Processes) -> Iterator[str]:
    """The folder to write in; when the block ends, it becomes the checkpoint `target`."""
    new = all_of_us.agree(str(int(not os.path.isdir(target)))) == "1"
    parent, name = os.path.split(target)
    folder = os.path.join(parent, f".{name}.{number}.part") if new else target
    if all_of_us.index == 0:
        os.makedirs(folder, exist_ok=True)
    all_of_us.wait("folder")
    if all_of_us.index != 0:
        yield folder
        all_of_us.wait("named")
        return
    with locked(folder):
        yield folder
        sync_folder(folder)
        if new:
            os.rename(folder, target)
            sync_folder(parent)
        _remove_leftovers(target)
    all_of_us.wait("named")


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
                    shutil.rmtree(os.path.join(parent, name))
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
    """Write the index by which Hugging Face libraries find the tensors of a flat dict."""
    path = os.path.join(folder, foreign.HUB_INDEX)
    flat = _flat(tree) or {}
    open_files = [TensorFile(os.path.join(folder, about["name"])) for about in files]
    named = {v.get("$tensor") if isinstance(v, dict) else None: k for k, v in flat.items()}
    if not flat or None in named or any(name not in flat for name in named) or any(f.parts for f in open_files):
        if os.path.exists(path):  # of an earlier save of something else
            os.unlink(path)
        return
    where = {key: os.path.basename(file.path) for file in open_files for key in file.entries}
    size = sum(entry.end - entry.begin for file in open_files for entry in file.entries.values())
    _write_json(path, {"metadata": {"total_size": size}, "weight_map": where})


def _load_folder(target: str) -> Any:
    path = os.path.join(target, INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        stored = content.pop("crc32")
        damaged = content["format"] == _FORMAT and stored != _checksum(content)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged, or of something else ({type(error).__name__}: {error})") from error
    if damaged:
        raise CheckpointError(f"{path} is damaged: it has another checksum than when it was written")
    if content["format"] != _FORMAT:
        raise CheckpointError(f"{path} is of format {content['format']!r}; this version reads {_FORMAT!r}")
    files = []
    for about in content["files"]:
        place = os.path.join(target, about["name"])
        try:
            found = TensorFile(place)
        except FileNotFoundError:
            raise CheckpointError(f"{place}, a file of the checkpoint, is missing") from None
        if found.size != about["size"]:
            raise CheckpointError(f"{place} has {found.size:,} bytes, and had {about['size']:,} when it was written")
        if zlib.crc32(found.head) != about["head"]:
            raise CheckpointError(f"{place} is damaged: its head has another checksum than when it was written")
        files.append(found)
    tensors = Tensors(files)
    try:
        return decode(content["object"], tensors.get)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_data(written: str, target: str) -> None:
    """Raise an error if a file of `torch.save` cannot be loaded without running code; reads no tensor."""
    try:
        foreign.load_torch(written, lazily=True)
    except CheckpointError as error:
        raise UnsavableError(
            f"{target}: a file of torch.save is to hold tensors, numbers, strings, None, and dicts, lists and tuples "
            f"of them. In this object is what torch.load refuses ({error.__cause__ or error}). Save it in a folder: "
            "leave out the ending."
        ) from error


# -- a file ------------------------------------------------------------------------------------------------------------


def _save_single(tree: Any, sources: Sources, target: str) -> None:
    flat = _flat(tree)
    if flat is None or any(not isinstance(v, dict) or "$tensor" not in v for v in flat.values()):
        raise UnsavableError(
            f"{target}: a safetensors file holds one flat dict of tensors. Save this object in a folder: leave out the "
            "ending '.safetensors'."
        )
    if processes().index != 0:
        return
    ties = {name: value["$tensor"] for name, value in flat.items() if value["$tensor"] != name}
    for name, kept in ties.items():
        if kept not in flat or name in RESERVED:
            raise UnsavableError(
                f"{target}: a safetensors file cannot hold a tensor of the name {name!r}. Give it another, or save in "
                "a folder: leave out the ending '.safetensors'."
            )
    with placed(target) as aside:
        write(aside, sources.whole(), ties)


@contextmanager
def _explained(target: str) -> Iterator[None]:
    try:
        yield
    except (SaveError, CheckpointMissingError):
        raise
    except OSError as error:
        raise SaveError(f"{error.filename or target} cannot be written: {error.strerror or error}") from error
