"""Any slice of any fill by the GPU kernels, run on the CPU, including sizes beyond 32-bit indices."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from firstloss.gpu import cpu_stream, cuda_stream, probe
from firstloss.gpu.fill_slices import Slice
from firstloss.rng import cuda_layout
from firstloss.rng.cuda_layout import GpuProperties
from firstloss.rng.stream import Position, Stream

from .emulated import HostLauncher, compiler, vectorised

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="there is no C compiler on this machine"),
    pytest.mark.skipif(not vectorised(), reason="PyTorch's normals are not those of AVX2 on this machine"),
]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FILLS = [(name, dtype) for name in ("uniform", "normal") for dtype in DTYPES]
FAR = 1 << 40


def as_bits(tensor):
    return tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize])


@st.composite
def slices(draw, most=300):
    """The size of a fill, and a short slice at any position in it: contiguous, or columns of some rows."""
    numel = draw(st.one_of(st.integers(16, 5000), st.integers(16, FAR)))
    if draw(st.booleans()):
        low = draw(st.integers(0, numel - 1))
        return numel, Slice(low, min(numel, low + draw(st.integers(1, most))))
    row = draw(st.integers(1, min(numel, 60)))
    rows = numel // row
    first = draw(st.integers(0, rows - 1))
    count = draw(st.integers(1, min(rows - first, most // row + 1)))
    column = draw(st.integers(0, row - 1))
    width = draw(st.integers(1, row - column))
    return rows * row, Slice(first * row, (first + count) * row, row, column, width)


def elements(part):
    """The indices of the slice's elements, in order."""
    indices = np.arange(part.low, part.high)
    if not part.row:
        return indices
    return indices.reshape(-1, part.row)[:, part.column : part.column + part.width].reshape(-1)


def written(part, dtype, fill):
    """What `fill`, given an address, writes there: the slice and nothing after it."""
    buffer = torch.full((part.numel + 8,), float("nan"), dtype=dtype)
    fill(buffer.data_ptr())
    assert torch.isnan(buffer[part.numel :]).all()
    return buffer[: part.numel]


def drawn_there(stream, begin, name, dtype, pair, low, high):
    """Elements [low, high), in whole groups of 16, of a fill that begins at `begin`: by PyTorch's own kernel, with a
    generator at that stream position."""
    words = 2 if dtype == torch.float64 else 1
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(stream.state_at(Position(begin + words * low))))
    return getattr(torch.empty(high - low, dtype=dtype), f"{name}_")(*pair, generator=generator)


@settings(max_examples=60)
@given(st.integers(0, (1 << 64) - 1), st.integers(0, FAR), st.sampled_from(FILLS), slices(), st.integers(9, 14))
def test_slices_of_cpu_fills_match_pytorch(seed, begin, fill, of, bits):
    (name, dtype), (numel, part) = fill, of
    assume(cpu_stream.can_make(name, numel, dtype) and probe.cpu_type_is_supported(name, dtype))
    if name == "normal":  # the last 16 of a ragged fill are redrawn: see test_fills.py
        numel += -numel % 16
    pair = (0.25, 0.5) if name == "normal" else (-0.3, 0.7)
    stream = Stream.from_state(torch.Generator().manual_seed(seed).get_state().numpy())
    piece = (stream, begin, name, numel, dtype, pair, part)
    result = written(
        part,
        dtype,
        lambda out: cpu_stream.fill(
            [cpu_stream.CpuPiece(*piece, out, probe.uniform_bits(dtype))], HostLauncher(), bits
        ),
    )
    low = part.low // 16 * 16
    around = drawn_there(stream, begin, name, dtype, pair, low, max(low + 16, part.high + -part.high % 16))
    assert torch.equal(as_bits(result), as_bits(around[elements(part) - low]))


GEOMETRIES = st.builds(GpuProperties, st.integers(1, 200), st.sampled_from([1024, 1536, 2048]))


def by_the_layout(name, dtype, pair, seed, offset, numel, part, device, by_lane):
    """Each element computed from the layout and Philox, in numpy."""
    low, high = pair
    values = []
    for element in elements(part):
        of = str(dtype).removeprefix("torch.")
        place = cuda_layout.element_position(int(element), numel, device, offset, of, by_lane)
        block = [int(word) for word in cuda_layout.words(seed, place.subsequence, place.offset)]
        if dtype == torch.float64:
            x, y = block[2 * place.lane : 2 * place.lane + 2]
            if name == "uniform":
                values.append((x ^ y << 21) * 2.0**-53 + 2.0**-54)
                continue
            x, y = block[0] ^ block[1] << 21, block[2] ^ block[3] << 21
            u, v = x * 2.0**-53 + 2.0**-54, 2 * np.pi * (y * 2.0**-53 + 2.0**-54)
        elif name == "uniform":
            values.append(np.float32(np.float32(block[place.lane]) * np.float32(2.0**-32) + np.float32(2.0**-33)))
            continue
        else:
            x, y = block[place.lane & 2 : (place.lane & 2) + 2]
            # In float32, like the kernel: near 1, the logarithm is that of the rounded number.
            u = np.float64(np.float32(x) * np.float32(2.0**-32) + np.float32(2.0**-33))
            v = np.float64(np.float32(y) * np.float32(2 * np.pi * 2.0**-32) + np.float32(np.pi * 2.0**-32))
        direction = np.cos(v) if place.lane & 1 else np.sin(v)
        values.append(np.sqrt(-2 * np.log(u)) * direction * high + low)
    rounded = torch.tensor(np.array(values, np.float64)).to(dtype)
    return rounded.masked_fill(rounded == high, low) if name == "uniform" else rounded


@settings(max_examples=60)
@given(
    st.integers(0, (1 << 64) - 1),
    st.integers(0, FAR).map(lambda n: 4 * n),
    st.sampled_from(FILLS),
    slices(100),
    GEOMETRIES,
    st.booleans(),
)
def test_slices_of_cuda_fills_follow_the_layout(seed, offset, fill, of, device, by_lane):
    (name, dtype), (numel, part) = fill, of
    pair = 0.0, 1.0
    piece = seed, offset, name, numel, dtype, pair, part
    actual = written(
        part,
        dtype,
        lambda out: cuda_stream.fill([cuda_stream.CudaPiece(*piece, out)], HostLauncher(), device, by_lane),
    )
    expected = by_the_layout(name, dtype, pair, seed, offset, numel, part, device, by_lane)
    if name == "uniform":
        assert torch.equal(as_bits(actual), as_bits(expected))
    else:  # this machine's sine and logarithm instead of a GPU's
        # Near 2 pi, where the sine is near 0, the last bit of a float32 angle is 5e-7; the radius is at most 6.7.
        rtol, atol = {torch.float64: (1e-12, 1e-13), torch.float32: (1e-5, 1e-5)}.get(dtype, (1e-2, 1e-3))
        assert torch.allclose(actual.double(), expected.double(), rtol=rtol, atol=atol)
