"""Reading of other libraries' files: safetensors, Hugging Face folders, `torch.save`."""

from __future__ import annotations

import os
import zipfile
import zlib
from typing import Any

import torch

from ...capture.recorder import DeferredStorage, DeferredTensor
from ...compat.torch_names import FakeTensorMode, checkpoint_offset, neg_view
from ...errors import CheckpointError, CheckpointMissingError
from ...files import exists
from ...interpreter import Uninterrupted
from ...program.graph import FileValue, Ref, is_contiguous
from .file import TensorFile
from .map import map_tensors
from .tensors import SMALL_BYTES, Tensors
from .untrusted import as_part_of, damage_as_errors, parse

HUB_INDEX = "model.safetensors.index.json"
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDICES = (HUB_INDEX, "pytorch_model.bin.index.json")


def load_folder(folder: str) -> dict[str, torch.Tensor]:
    """Load the weights in a Hugging Face folder, by name."""
    for name in _SINGLE:
        if exists(os.path.join(folder, name)):
            return load_file(os.path.join(folder, name))
    for name in _INDICES:
        path = os.path.join(folder, name)
        if exists(path):
            with open(path, "rb") as file, damage_as_errors(path):
                where = dict(parse(file.read())["weight_map"])
                if not all(isinstance(part, str) for item in where.items() for part in item):
                    raise TypeError("weight_map must map names to names")
            return _load_indexed(folder, path, where)
    raise CheckpointMissingError(
        f"{folder} has no complete checkpoint: it contains neither checkpoint.json nor a Hugging Face model"
    )


def _load_indexed(folder: str, index: str, where: dict[str, str]) -> dict[str, torch.Tensor]:
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name in dict.fromkeys(where.values()):
        with as_part_of(index, name) as path:
            files[name] = load_file(path)
            if not isinstance(files[name], dict):
                raise CheckpointError(f"{path}, to which {index} refers, holds no dict of tensors")
    out = {}
    for key, name in where.items():
        if key not in files[name]:
            raise CheckpointError(f"{os.path.join(folder, name)} has no tensor {key}, to which {index} refers")
        out[key] = files[name][key]
    for loaded in files.values():
        out.update({key: tensor for key, tensor in loaded.items() if key not in out})  # ties
    return out


def load_file(path: str) -> Any:
    """Load a safetensors file or a file of `torch.save`."""
    try:
        with open(path, "rb") as file:
            start = file.read(9)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointMissingError(f"there is no checkpoint at {path}") from None
    if start[:2] == b"PK" or start[:1] == b"\x80":
        return load_torch(path, lazily=start[:2] == b"PK")
    return _load_safetensors(path)


def _load_safetensors(path: str) -> dict[str, torch.Tensor]:
    file = TensorFile(path)
    tensors = Tensors([file])
    out = {name: tensors.get(name) for name in tensors.names()}
    # safetensors' `save_model`, and `save_initialized`, list tied names in the metadata.
    ties = {
        tied: stored for tied, stored in file.metadata.items() if stored in out and tied not in out and tied != "format"
    }
    out.update({tied: out[stored] for tied, stored in ties.items()})
    return out


# -- torch.save --------------------------------------------------------------------------------------------------------


def load_torch(path: str, lazily: bool) -> Any:
    """Load data only: PyTorch's reader rejects anything that would run code. Tensors in a zip file are read lazily."""
    with Uninterrupted():  # what handlers of signals raise must not be taken for damage
        try:
            if not lazily:
                return torch.load(path, map_location="cpu", weights_only=True)
            archive = _Archive(path)
            with FakeTensorMode():
                loaded = torch.load(path, map_location="cpu", weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise CheckpointError(
                f"{path} is damaged, or holds code, which is never run ({type(error).__name__}: {reason})"
            ) from error
    return map_tensors(loaded, archive.tensor)


class _Archive:
    """The storages in a file of `torch.save`: uncompressed members of a zip, each with a checksum."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "rb")
        try:
            archive = zipfile.ZipFile(self._file)
            members = [m for m in archive.infolist() if m.compress_type == zipfile.ZIP_STORED]
            for member in members:
                # The pickle, whose checksum PyTorch's reader does not verify; 0 in files written without checksums
                if "/data/" not in member.filename and member.CRC:
                    archive.read(member)
                if member.filename.endswith("/.storage_alignment"):  # PyTorch's reader divides by it
                    if int(os.pread(self._file.fileno(), member.file_size, self._offset_of(member))) <= 0:
                        raise ValueError("storages are aligned to 0 bytes")
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} is damaged or truncated ({error})") from error
        self._members = {self._offset_of(member): member for member in members}  # by the offset of their content
        self._stores: dict[int, DeferredStorage] = {}

    def _offset_of(self, member: zipfile.ZipInfo) -> int:
        """Where the content begins, after a header of 30 bytes, a name and an extra field."""
        lengths = os.pread(self._file.fileno(), 4, member.header_offset + 26)
        return member.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")

    def tensor(self, fake: torch.Tensor, name: str) -> torch.Tensor:
        """The real or deferred tensor for `fake`; tensors that share a storage still share it."""
        storage: Any = fake.untyped_storage()
        offset, nbytes = checkpoint_offset(storage), storage.nbytes()
        ref_geometry = (tuple(fake.shape), fake.stride(), int(fake.storage_offset()), fake.dtype)
        store = self._stores.get(offset)
        if store is None:
            whole = is_contiguous(fake.shape, fake.stride()) and fake.numel() * fake.itemsize == nbytes
            shape = tuple(fake.shape) if whole else (nbytes // fake.itemsize,)
            stride = fake.stride() if whole else (1,)

            def read() -> torch.Tensor:
                return self._read(offset, nbytes, name).view(fake_dtype).reshape(shape)

            fake_dtype = fake.dtype
            value = FileValue(shape, stride, fake.dtype, read, f"{name} in {self._path}")
            store = self._stores[offset] = DeferredStorage(value)
        if fake.is_conj() or fake.is_neg():  # not part of a Ref's geometry
            real = Ref(store.value, *ref_geometry).view(store.value.real)  # type: ignore[arg-type]
            real = real.conj() if fake.is_conj() else real
            return neg_view(real) if fake.is_neg() else real
        if nbytes <= SMALL_BYTES:
            return Ref(store.value, *ref_geometry).view(store.value.real)  # type: ignore[arg-type]
        return DeferredTensor.wrap(store, *ref_geometry)

    def _read(self, offset: int, nbytes: int, name: str) -> torch.Tensor:
        data = torch.empty(nbytes, dtype=torch.uint8)
        if not nbytes:
            return data
        member = self._members.get(offset)
        if member is None or member.file_size != nbytes:
            raise CheckpointError(f"{self._path} is damaged: there is no storage of {nbytes:,} bytes for {name}")
        view, at = memoryview(data.numpy()), offset
        while view:
            count = os.preadv(self._file.fileno(), [view], at)
            if count == 0:
                raise CheckpointError(f"{self._path} is truncated: {name} ({member.filename}) lies beyond its end")
            view, at = view[count:], at + count
        if member.CRC and zlib.crc32(memoryview(data.numpy())) != member.CRC:
            raise CheckpointError(f"{self._path}: {name} is damaged: {member.filename} has the wrong checksum")
        return data
