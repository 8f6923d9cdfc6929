"""`firstloss.save` and `firstloss.load`: checkpoints that are whole or not there.

A checkpoint is a folder: `checkpoint.json` says how the object is built and which files hold its tensors; the files are
safetensors with checksums, one a process. A new folder is made aside and renamed when all of it is on disk. In a folder
that exists, new files are written beside the old ones, `checkpoint.json` is replaced, and the old ones are removed. So
whenever a process is killed, what can be found under a checkpoint's name is whole: the new one, or the one before.
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
from ...files import locked, placed, sync_folder, written_aside
from ...init.materialize import materialize_tensor
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

    Tensors are written one after another, so that host memory holds one at a time beside what it holds already; those
    on a backend are read from its device. Of names for one and the same memory one is stored. When the process is
    killed, `path` is what it was before. With several processes all call this with the same objects, each writes the
    parts of sharded tensors that it owns, and `path` must be on a file system that they share.

    Args:
        obj: dicts, lists and tuples, however nested, of tensors, numbers, strings, None, numpy arrays: state dicts of
            modules, optimizers, schedulers, loaders and backends, `torch.get_rng_state()`.
        path: a folder, made if it does not exist. With the ending `.safetensors` a file of that format (a flat dict of
            tensors only), with `.pt`, `.pth` or `.bin` one that `torch.load` opens; both are written by process 0. A
            folder of a flat dict of tensors, as a module's state dict is, is also read by Hugging Face libraries.

    Raises:
        UnsavableError: for an object that is no data, naming where it is.
        SaveError: when the system refuses to write, or another process writes there.
    """
    target = os.path.abspath(os.fspath(path))
    with timeline.span("save"), _explained(target):
        if target.endswith(_TORCH):
            if processes().index == 0:
                with written_aside(target) as file:
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
    """What was saved at `path`, its tensors read when they are used.

    Tensors of some size are left on disk until an operation needs them, or a model that is still deferred or lives on a
    backend takes them over by `load_state_dict`, which reads them straight to where they belong; each is checked when
    it is read. Smaller ones are read at once. Files may be replaced meanwhile; what was loaded stays readable.

    Args:
        path: what `save` or `save_initialized` has written; a safetensors file, or a Hugging Face folder of them; a
            file of `torch.save`, of which only data is loaded: no code in it is ever run.
        map_location: None: as said. A device, as "cpu": all tensors are read now, and lie there; "meta": none is read,
            and they have shapes and dtypes alone.

    Returns:
        The object that was given to `save`: tensors in the same dicts, lists and tuples.

    Raises:
        CheckpointError: for another map_location.
        CheckpointMissingError: if there is no complete checkpoint at `path`.
        CheckpointError: if it is damaged or nothing that can be read, naming the file and the tensor. Damage within a
            tensor is found when the tensor is read.
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
    """The folder to write in; when the block ends, what is in it is the checkpoint `target`."""
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
    """Remove what is no part of the checkpoint: of the one before, and of saves that were killed."""
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
                continue  # somebody is at it


def _description(path: str) -> dict[str, Any]:
    head = TensorFile(path).head
    return {"name": os.path.basename(path), "size": os.path.getsize(path), "head": zlib.crc32(head)}


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _write_json(path: str, content: Any) -> None:
    with written_aside(path, "w") as file:
        json.dump(content, file)
        file.write("\n")


def _flat(tree: Any) -> dict[str, Any] | None:
    """What a dict holds by name; None for anything else, or where a key is no name."""
    pairs = tree.get("$state_dict", [tree])[0] if isinstance(tree, dict) else None
    if isinstance(pairs, dict) and "$ordered" in pairs:
        pairs = pairs["$ordered"]
        return dict(pairs) if all(isinstance(key, str) for key, _ in pairs) else None
    return pairs


def _write_hub_index(folder: str, tree: Any, files: list[dict[str, Any]]) -> None:
    """Where the tensors of a flat dict are, as Hugging Face libraries look for them."""
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
    """An error if a file of `torch.save` holds what nobody loads without running code; no tensor is read."""
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
