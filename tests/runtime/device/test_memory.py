"""Memory shared by torch and the device."""

import jax
import pytest
import torch

import firstloss as fl
from firstloss.runtime import jax_support
from tests.small_training import training_step

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (300, 200)])
@pytest.mark.parametrize("shared", [True, False])
def test_tensors_round_trip_through_the_device(dtype, shape, shared, monkeypatch):
    monkeypatch.setattr(jax_support, "on_cpu", lambda: shared)
    torch.manual_seed(0)
    tensor = (torch.rand(shape) * 100).to(dtype)
    array = jax_support.to_device(tensor)
    assert array.shape == shape
    back = jax_support.to_host(array)
    assert back.dtype == dtype and torch.equal(back, tensor)


def test_a_transposed_tensor_keeps_its_logical_order():
    tensor = torch.arange(60_000.0).reshape(200, 300).t()
    assert torch.equal(jax_support.to_host(jax_support.to_device(tensor)), tensor)


def test_memory_of_the_device_can_be_written_and_donated():
    array, memory = jax_support.empty((1000, 1000), torch.float32)
    memory.fill_(2.0)
    address = array.unsafe_buffer_pointer()
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(array)
    assert array.is_deleted() and doubled.unsafe_buffer_pointer() == address
    assert float(doubled.sum()) == 4e6


def test_weights_are_updated_in_place(tmp_path):
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    with backend.device:
        model = torch.nn.Linear(512, 512)
    step = training_step(fl.compile(model, backend), torch.optim.SGD(model.parameters(), lr=0.1))
    float(step(torch.ones(4, 512)))
    before = model.weight._storage.resident.array().unsafe_buffer_pointer()
    float(step(torch.ones(4, 512)))
    assert model.weight._storage.resident.array().unsafe_buffer_pointer() == before


@pytest.mark.own_compile_cache
def test_a_second_start_finds_the_compiled_step(tmp_path):
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    model = torch.nn.Linear(8, 8)
    compiled = fl.compile(model, backend)
    fl.trace(lambda x: compiled(x).sum())(torch.ones(2, 8))
    cached = list((tmp_path / "compiled").iterdir())
    assert cached and all(file.stat().st_size for file in cached)


def test_a_dtype_that_xla_lacks_is_refused():
    with pytest.raises(NotImplementedError, match="no counterpart"):
        jax_support.to_device(torch.zeros(2, dtype=torch.complex32))


def test_whole_writes_of_a_weight_are_in_place(tmp_path):
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    with backend.device:
        model = torch.nn.Linear(512, 512)
    fl.compile(model, backend)
    cell = model.weight._storage.resident
    with torch.no_grad():
        model.weight.fill_(2.0)
        address = cell.host().data_ptr()
        before = cell.array()
        assert before.unsafe_buffer_pointer() == address and float(before.sum()) == 2.0 * 512 * 512
        model.weight[0, 0] = 5.0  # the exported array is unchanged
        assert float(before[0, 0]) == 2.0 and float(cell.array()[0, 0]) == 5.0
