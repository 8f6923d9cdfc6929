"""Uninitialized memory."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec

from firstloss import c_library
from firstloss.lower import unwritten

from .xla_header import assert_declared

SOURCE = Path(unwritten.__file__).with_name("_unwritten.c")
# The fields of each structure that the handler uses, and their names in XLA's header.
FIELDS = [
    ("struct extension", "type", "XLA_FFI_Extension_Base", "type"),
    ("struct version", "major", "XLA_FFI_Api_Version", "major_version"),
    ("struct version", "minor", "XLA_FFI_Api_Version", "minor_version"),
    ("struct metadata", "version", "XLA_FFI_Metadata", "api_version"),
    ("struct metadata_extension", "metadata", "XLA_FFI_Metadata_Extension", "metadata"),
    ("struct call_frame", "extension", "XLA_FFI_CallFrame", "extension_start"),
]


def compiled(kinds):
    return unwritten._maker(tuple(kinds)).as_text()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
def test_handler_structures_match_xlas_header(tmp_path):
    assert_declared(SOURCE, FIELDS, {"METADATA": "XLA_FFI_Extension_Metadata"}, tmp_path)


def test_without_the_library_memory_is_cleared(monkeypatch):
    monkeypatch.setattr(c_library, "SUFFIX", ".nowhere")
    monkeypatch.setattr(unwritten, "registered_with_xla", unwritten.registered_with_xla.__wrapped__)
    (array,) = unwritten.arrays([((77, 53), np.dtype("float32"))])
    assert np.array_equal(array, np.zeros((77, 53)))


def test_nothing_is_written():
    if not unwritten.registered_with_xla():
        pytest.skip("the handler is not built: python setup.py build_ext --inplace")
    text = compiled([((4096, 300), np.dtype("float32")), ((1 << 20,), np.dtype("int64"))])
    assert "custom-call" in text and "broadcast" not in text


def test_each_is_a_separate_array_that_can_be_donated():
    kinds = [((512, 300), np.dtype("float32"))] * 3 + [((), np.dtype("int64")), ((0, 4), np.dtype("float32"))]
    arrays = unwritten.arrays(kinds)
    assert [(array.shape, array.dtype) for array in arrays] == kinds
    addresses = [array.unsafe_buffer_pointer() for array in arrays[:3]]
    assert len(set(addresses)) == 3
    for number, array in enumerate(arrays[:3]):
        unwritten.memory_of(array, torch.float32).fill_(number)
    for number, array in enumerate(arrays[:3]):
        doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(array)
        assert doubled.unsafe_buffer_pointer() == addresses[number]
        assert np.array_equal(doubled, np.full((512, 300), 2.0 * number))


def test_without_a_handler_memory_is_cleared(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("incompatible version")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    monkeypatch.setattr(unwritten, "registered_with_xla", unwritten.registered_with_xla.__wrapped__)
    (array,) = unwritten.arrays([((77, 55), np.dtype("float32"))])
    assert np.array_equal(array, np.zeros((77, 55)))


def test_arrays_can_be_sharded():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    array = unwritten.array_on(sharding, (64, 8), np.dtype("float32"))
    assert array.shape == (64, 8) and array.sharding.is_equivalent_to(sharding, 2)
