"""Stream samplers are bit-identical to torch, whichever kernels they use."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import firstloss as fl
from firstloss.compat.cpu_fills import uniform_leaves_out_end
from firstloss.engine import reader, sampler
from firstloss.rng import Position, Stream, native

with_kernels = pytest.mark.skipif(
    not sampler.trusted(),
    reason="the native kernels are not built (python setup.py build_ext --inplace), or not PyTorch's on this machine",
)


def bits(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@pytest.fixture(params=["native", "torch"])
def kernels(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(sampler, "trusted", lambda: False)
    elif not sampler.trusted():
        pytest.skip("no native kernels")
    return request.param


# Some have native kernels and some do not, so the stream passes from one to the other.
fills = st.sampled_from(
    [
        ("normal", 0.0, 1.0),
        ("normal", 0.5, 1.0),
        ("normal", 1.0, 2.0),
        ("normal", 0.0, 0.02),
        ("uniform", 0.0, 1.0),
        ("uniform", -1.0, 0.5),
        ("uniform", -3.0, -3.0),
        ("uniform", 2.0**23, 2.0**23 + 4),
    ]
)
tensors = st.tuples(
    st.one_of(st.integers(0, 40), st.integers(0, 5000)),
    st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.bfloat16]),
    st.sampled_from([False, False, False, True]),  # strided
)


def target(count, dtype, strided):
    return torch.zeros(2 * count, dtype=dtype)[::2] if strided else torch.zeros(count, dtype=dtype)


@settings(max_examples=150)
@given(st.lists(st.tuples(fills, tensors), min_size=1, max_size=6), st.booleans())
def test_consecutive_fills_match_torch(sequence, trust):
    with pytest.MonkeyPatch.context() as patch:
        if not trust:
            patch.setattr(sampler, "trusted", lambda: False)
        generator = torch.Generator().manual_seed(1)
        stream = Stream.from_state(generator.get_state().numpy())
        stream_sampler = sampler.StreamSampler()
        stream_sampler.seek(stream, Position(0))
        for (name, first, second), how in sequence:
            drawn, expected = target(*how), target(*how)
            stream_sampler.fill(name, drawn, first, second)
            getattr(expected, f"{name}_")(first, second, generator=generator)
            assert torch.equal(bits(drawn), bits(expected))


def test_the_position_can_be_moved_back_and_forth(kernels):
    generator = torch.Generator().manual_seed(1)
    stream = Stream.from_state(generator.get_state().numpy())
    expected = torch.empty(1000).normal_(generator=generator)
    stream_sampler = sampler.StreamSampler()
    for begin in (480, 0, 16):
        drawn = torch.empty(160)
        stream_sampler.seek(stream, Position(begin))
        stream_sampler.fill("normal", drawn, 0.0, 1.0)
        assert torch.equal(drawn, expected[begin : begin + 160])
        stream_sampler.at = (stream, Position(begin + 160))
        stream_sampler.seek(stream, Position(begin + 160))
        stream_sampler.fill("normal", drawn, 0.0, 1.0)
        assert torch.equal(drawn, expected[begin + 160 : begin + 320])


@pytest.mark.parametrize(
    "name, numbers",
    [("normal", (0.0, -1.0)), ("uniform", (1.0, 0.0)), ("uniform", (-3e38, 3e38)), ("uniform", (0.0, 1e300))],
)
def test_invalid_fills_are_refused_as_by_torch(name, numbers):
    with pytest.raises(RuntimeError) as expected:
        getattr(torch.empty(100), f"{name}_")(*numbers)
    stream = Stream.from_state(torch.Generator().get_state().numpy())
    stream_sampler = sampler.StreamSampler()
    stream_sampler.seek(stream, Position(0))
    with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
        stream_sampler.fill(name, torch.empty(100), *numbers)
    assert stream_sampler.at is None


@with_kernels
def test_native_fills_are_recognized():
    contiguous = torch.empty(100)
    assert sampler.is_native("normal", contiguous, 0.0, 1.0)
    assert sampler.is_native("uniform", contiguous[3:90], 0.0, 1.0)
    assert not sampler.is_native("normal", contiguous[:15], 0.0, 1.0)
    assert not sampler.is_native("normal", contiguous[::2], 0.0, 1.0)
    assert not sampler.is_native("normal", contiguous.double(), 0.0, 1.0)
    assert not sampler.is_native("normal", torch.empty(100, device="meta"), 0.0, 1.0)
    reaching_the_end = sampler.is_native("uniform", contiguous, 2.0**23, 2.0**23 + 4)
    assert reaching_the_end == uniform_leaves_out_end()


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
def test_kernels_that_differ_at_the_end_are_trusted_elsewhere(monkeypatch):
    def keeps_end(kernel):
        def uniform(self, address, count, low, high):
            kernel(self, address, count, low, high)
            if native.may_round_to_end(low, high):
                native.ctypes.c_uint32.from_address(address).value ^= 1

        return uniform

    monkeypatch.setattr(native.Cursor, "uniform", keeps_end(native.Cursor.uniform))
    monkeypatch.setattr(sampler, "end_matches", sampler.end_matches.__wrapped__)
    if not sampler.trusted():
        pytest.skip("without AVX2, PyTorch's kernels round otherwise, so the native ones are not used")
    target = torch.empty(100)
    assert sampler.is_native("uniform", target, -1.0, 1.0)
    assert not sampler.is_native("uniform", target, 2.0**23, 2.0**23 + 4)


@pytest.fixture
def unchecked():
    sampler.trusted.cache_clear()
    yield
    sampler.trusted.cache_clear()


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
def test_kernels_that_differ_anywhere_are_not_trusted(monkeypatch, unchecked):
    class OneBitOff(native.Cursor):
        def normal(self, address, count, mean, std):
            super().normal(address, count, mean, std)
            if (mean, std) == (-0.3, 0.02):
                word = native.ctypes.c_uint32.from_address(address + 4 * 12_345)
                word.value ^= 1

    monkeypatch.setattr(native, "Cursor", OneBitOff)
    assert not sampler.trusted()


@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
def test_kernels_that_leave_another_state_are_not_trusted(monkeypatch, unchecked):
    class Behind(native.Cursor):
        def state(self):
            state = super().state()
            state[0] ^= 1
            return state

    monkeypatch.setattr(native, "Cursor", Behind)
    assert not sampler.trusted()


def test_without_the_library_nothing_is_trusted(monkeypatch, unchecked):
    monkeypatch.setattr(native, "_library", None)
    assert not native.available() and not sampler.trusted()
    assert torch.equal(weights(fl.deferred_init(Layers)), weights(eager()))


@with_kernels
def test_the_check_is_quick_and_leaves_the_global_generator_alone(unchecked):
    before = torch.get_rng_state()
    assert sampler.trusted()
    assert torch.equal(torch.get_rng_state(), before)


@with_kernels
def test_the_check_is_not_captured(unchecked):
    with torch.device("meta"):
        assert sampler.trusted()


class Layers(torch.nn.Module):
    """Long, short, ragged and dead fills, other dtypes, and edits: everything that occurs between native fills."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.long = torch.nn.Parameter(torch.empty(700, 1001).normal_(0.0, 0.02))
        self.linear = torch.nn.Linear(301, 203)
        self.short = torch.nn.Parameter(torch.empty(5).normal_())
        self.ragged = torch.nn.Parameter(torch.empty(1003).normal_(mean=1.0, std=3.0))
        self.bfloat = torch.nn.Parameter(torch.empty(100, dtype=torch.bfloat16).normal_())
        self.embedding = torch.nn.Embedding(1000, 177, padding_idx=0)
        torch.nn.init.uniform_(self.embedding.weight, -1, 1)
        self.truncated = torch.nn.Parameter(torch.nn.init.trunc_normal_(torch.empty(300, 500), std=0.02))
        self.after = torch.nn.Parameter(torch.empty(33, 3).uniform_(-0.1, 0.1))


def eager():
    return Layers()


def weights(module):
    fl.materialize_module(module)
    return torch.cat([bits(weight) for weight in module.parameters()])


def test_a_module_matches_eager(kernels, monkeypatch):
    monkeypatch.setattr(reader, "_NATIVE_PIECE", 1 << 17)
    deferred = fl.deferred_init(Layers)
    state = torch.get_rng_state()
    expected = weights(eager())
    assert torch.equal(weights(deferred), expected)
    assert torch.equal(torch.get_rng_state(), state)
