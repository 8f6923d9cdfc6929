"""Whole fills and slices by the GPU kernels, run on the CPU, against PyTorch and against the layout."""

import numpy as np
import pytest
import torch

from firstloss.gpu import cpu_stream, cuda_stream
from firstloss.gpu.fill_slices import Slice
from firstloss.gpu.kernels import CudaLauncher
from firstloss.rng import cuda_layout, words_drawn
from firstloss.rng.cuda_layout import GpuProperties
from firstloss.rng.stream import Stream

from .emulated import HostLauncher, compiler, vectorised

pytestmark = [
    pytest.mark.skipif(not vectorised(), reason="PyTorch's normals are not those of AVX2 on this machine"),
]

BITS = {torch.float32: 24, torch.float64: 53, torch.bfloat16: 8, torch.float16: 11}


def as_bits(tensor):
    return tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize])


def poisoned(count, dtype, launcher):
    return torch.full((count + 8,), float("nan"), dtype=dtype, device=launcher.device)


@pytest.fixture(params=["on the CPU", pytest.param("on a GPU", marks=pytest.mark.gpu)])
def launcher(request):
    """The kernels as compiled C code."""
    if request.param == "on the CPU":
        if compiler() is None:
            pytest.skip("there is no C compiler on this machine")
        return HostLauncher()
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU on this machine")
    return CudaLauncher()


class Drawing:
    """Fills in eager PyTorch, one after another, with the stream position at which each began."""

    def __init__(self, seed=3):
        self.generator = torch.Generator().manual_seed(seed)
        torch.empty(77, dtype=torch.int32).random_(generator=self.generator)
        self.stream = Stream.from_state(self.generator.get_state().numpy())
        self.at = 0

    def fill(self, name, count, dtype, pair):
        values = torch.empty(count, dtype=dtype)
        getattr(values, f"{name}_")(*pair, generator=self.generator)
        begin = self.at
        self.at += words_drawn.draw(name, str(dtype).removeprefix("torch."), count).words
        return begin, values

    def skip(self, words):
        torch.empty(words, dtype=torch.int32).random_(generator=self.generator)
        self.at += words


def bits_of(dtype):
    """The number of a word's bits from which this PyTorch makes a uniform."""
    from firstloss.gpu.probe import uniform_bits

    return uniform_bits(dtype)


def is_computed(name, dtype):
    from firstloss.gpu.probe import cpu_type_is_supported

    return cpu_stream.can_make(name, 1 << 20, dtype) and cpu_type_is_supported(name, dtype)


COUNTS = (16, 17, 100, 623, 624, 1000, 4096, 50_001)


@pytest.mark.parametrize("dtype", list(BITS), ids=str)
@pytest.mark.parametrize("name, pair", [("uniform", (0.0, 1.0)), ("uniform", (-0.3, 0.7)), ("normal", (0.5, 0.02))])
@pytest.mark.parametrize("bits", [10, 14])
def test_whole_fills_match_pytorch(name, pair, dtype, bits, launcher):
    if not is_computed(name, dtype):
        pytest.skip(f"this PyTorch's {dtype} {name} is made on the CPU")
    drawing, pieces, pairs = Drawing(), [], []
    for count in COUNTS:
        begin, expected = drawing.fill(name, count, dtype, pair)
        actual = poisoned(count, dtype, launcher)
        whole = Slice(0, count)
        pieces.append(
            cpu_stream.CpuPiece(
                drawing.stream, begin, name, count, dtype, pair, whole, actual.data_ptr(), bits_of(dtype)
            )
        )
        pairs.append((expected, actual))
        drawing.skip(5 * count)
    cpu_stream.fill(pieces, launcher, bits)
    for expected, actual in ((expected, actual.cpu()) for expected, actual in pairs):
        count = len(expected)
        assert torch.equal(as_bits(actual[:count]), as_bits(expected)), (
            count,
            (actual[:count] != expected).nonzero()[:5],
        )
        assert torch.isnan(actual[count:]).all()


def test_float32_is_filled_by_our_kernels():
    assert all(is_computed(name, torch.float32) for name in ("uniform", "normal"))


SLICES = {
    "first": Slice(0, 33),
    "middle": Slice(1001, 2777),
    "one": Slice(4000, 4001),
    "end": Slice(4991, 5005),
    "ragged": Slice(4980, 5005),
    "all": Slice(0, 5005),
    "columns": Slice(0, 5005, 55, 7, 20),
    "some rows' columns": Slice(110, 3300, 55, 54, 1),
    "last columns": Slice(55, 5005, 55, 30, 25),
}


def cut(whole, wanted):
    if not wanted.row:
        return whole[wanted.low : wanted.high]
    rows = whole[wanted.low : wanted.high].view(-1, wanted.row)
    return rows[:, wanted.column : wanted.column + wanted.width].reshape(-1)


@pytest.mark.parametrize("name", ["uniform", "normal"])
@pytest.mark.parametrize("which", [*SLICES, "all of these"])
def test_slices_match_pytorchs_fills(name, which, launcher):
    drawing = Drawing()
    drawing.skip(3333)
    begin, whole = drawing.fill(name, 5005, torch.float32, (0.0, 0.5))
    pieces, pairs = [], []
    for part in SLICES.values() if which == "all of these" else [SLICES[which]]:
        expected = cut(whole, part)
        assert part.numel == len(expected)
        actual = poisoned(len(expected), torch.float32, launcher)
        pieces.append(
            cpu_stream.CpuPiece(drawing.stream, begin, name, 5005, torch.float32, (0.0, 0.5), part, actual.data_ptr())
        )
        pairs.append((expected, actual))
    cpu_stream.fill(pieces, launcher, 9)
    for expected, actual in ((expected, actual.cpu()) for expected, actual in pairs):
        assert torch.equal(as_bits(actual[: len(expected)]), as_bits(expected))
        assert torch.isnan(actual[len(expected) :]).all()


def test_a_rank_computes_only_the_states_of_its_own_chunks():
    """An eighth of the draws takes an eighth of the windows, and the jumps to them."""
    drawing = Drawing()
    whole = [
        cpu_stream.CpuPiece(drawing.stream, i << 22, "normal", 1 << 22, torch.float32, (0.0, 1.0), Slice(0, 1 << 22), 0)
        for i in range(16)
    ]
    eighth = [p._replace(wanted=Slice(3 << 19, 4 << 19)) for p in whole]
    all_of_it, part = cpu_stream.LaunchTables(whole, 14), cpu_stream.LaunchTables(eighth, 14)
    assert all_of_it.windows == 16 << 8
    assert part.windows <= (16 << 8) / 8 * 1.2
    chunks, _ = part.layers[0]
    assert len(chunks) == 16 << 5


def test_several_streams_and_far_positions_match_pytorch(launcher):
    pieces, pairs = [], []
    for seed in (1, 2):
        drawing = Drawing(seed)
        for far in (0, 1 << 20, (1 << 33) + 12_345):
            # The expected values are from the stream itself: PyTorch would draw for hours.
            words = drawing.stream.words_at(far, 700)
            expected = torch.from_numpy(((words & 0xFFFFFF).astype(np.float32) * np.float32(2.0**-24)).copy())
            actual = poisoned(700, torch.float32, launcher)
            piece = cpu_stream.CpuPiece(
                drawing.stream, far, "uniform", 700, torch.float32, (0.0, 1.0), Slice(0, 700), actual.data_ptr()
            )
            pieces.append(piece)
            pairs.append((expected, actual))
    cpu_stream.fill(pieces, launcher, 14)
    for expected, actual in ((expected, actual.cpu()) for expected, actual in pairs):
        assert torch.equal(actual[:700], expected)


# -- CUDA's stream ----------------------------------------------------------------------------------------------------

SMALL = GpuProperties(2, 1024)


def expected_of(name, numel, dtype, pair, seed, offset, by_lane):
    """Each element computed from the layout and Philox, in numpy."""
    dtype_name = str(dtype).removeprefix("torch.")
    low, high = pair
    out = np.empty(numel, np.float64)
    for element in range(numel):
        place = cuda_layout.element_position(element, numel, SMALL, offset, dtype_name, by_lane)
        block = cuda_layout.words(seed, place.subsequence, place.offset).astype(np.float64)
        if dtype == torch.float64:
            x, y = (
                (int(block[i]) ^ int(block[i + 1]) << 21) for i in ((0, 2) if name == "normal" else (2 * place.lane, 0))
            )
            out[element] = x * 2.0**-53 + 2.0**-54
            if name == "uniform":
                out[element] = out[element] * (high - low) + low
            else:
                v = 2 * np.pi * (y * 2.0**-53 + 2.0**-54)
                direction = np.cos(v) if place.lane & 1 else np.sin(v)
                out[element] = np.sqrt(-2 * np.log(out[element])) * direction * high + low
        elif name == "uniform":
            out[element] = np.float32(np.float32(block[place.lane]) * np.float32(2.0**-32) + np.float32(2.0**-33))
            out[element] = np.float32(out[element] * np.float32(np.float32(high) - np.float32(low)) + np.float32(low))
            if torch.tensor(out[element]).to(dtype) == high:  # compared in the stored dtype
                out[element] = low
        else:
            u = block[place.lane & 2] * 2.0**-32 + 2.0**-33
            v = 2 * np.pi * (block[(place.lane & 2) + 1] * 2.0**-32 + 2.0**-33)
            direction = np.cos(v) if place.lane & 1 else np.sin(v)
            out[element] = np.sqrt(-2 * np.log(u)) * direction * high + low
    return torch.from_numpy(out).to(dtype)


@pytest.mark.parametrize("by_lane", [False, True])
@pytest.mark.parametrize(
    "name, pair, dtype",
    [
        ("uniform", (0.0, 1.0), torch.float32),
        ("uniform", (-1.0, 3.0), torch.float32),
        ("uniform", (0.0, 1.0), torch.bfloat16),
        ("uniform", (-1.0, 1.0), torch.float64),
        ("normal", (0.0, 1.0), torch.float32),
        ("normal", (1.0, 0.5), torch.bfloat16),
        ("normal", (0.0, 1.0), torch.float16),
        ("normal", (0.0, 1.0), torch.float64),
    ],
    ids=str,
)
def test_slices_of_cuda_fills_follow_the_layout(name, pair, dtype, by_lane, launcher):
    seed, offset = (1 << 63) + 12345, 4 * ((1 << 33) + 7)
    for numel in (5, 3000, 9001):
        expected = expected_of(name, numel, dtype, pair, seed, offset, by_lane)
        slices = [Slice(0, numel), Slice(numel // 3, numel // 3 * 2 + 1)]
        slices += [Slice(0, 3000, 30, 7, 5)] if numel == 3000 else []
        pieces, pairs = [], []
        for wanted in slices:
            part = cut(expected, wanted)
            actual = poisoned(len(part), dtype, launcher)
            pieces.append(cuda_stream.CudaPiece(seed, offset, name, numel, dtype, pair, wanted, actual.data_ptr()))
            pairs.append((part, actual))
        cuda_stream.fill(pieces, launcher, SMALL, by_lane)
        for part, actual in ((part, actual.cpu()) for part, actual in pairs):
            if name == "uniform":
                assert torch.equal(actual[: len(part)], part)
            else:  # this machine's sine and logarithm instead of a GPU's
                within = 1e-5 if dtype == torch.float32 else 1e-2  # one unit in the last place of half precision
                assert torch.allclose(actual[: len(part)].double(), part.double(), rtol=within, atol=1e-5)
            assert torch.isnan(actual[len(part) :]).all()


def test_a_slice_costs_its_own_size():
    """In units of the table: an eighth of a large fill takes an eighth of them, and one more at each end."""
    h100 = GpuProperties(132, 2048)
    numel = 1 << 30
    whole = cuda_stream.CudaPiece(0, 0, "normal", numel, torch.bfloat16, (0.0, 1.0), Slice(0, numel), 0)
    _, units = cuda_stream.table([whole], h100)
    _, part = cuda_stream.table([whole._replace(wanted=Slice(numel // 8, numel // 4))], h100)
    assert units == pytest.approx(numel / 4 / 1024, rel=0.01)
    assert part <= units / 8 * 1.02


def test_a_fill_in_several_launches_has_one_table():
    numel = (1 << 31) + 64
    whole = cuda_stream.CudaPiece(0, 4, "uniform", numel, torch.float32, (0.0, 1.0), Slice(0, numel), 0)
    rows, units = cuda_stream.table([whole], GpuProperties(132, 2048))
    assert len(rows) > 1 and rows["numel"].sum() == numel
    begin, end = rows["begin"], rows["begin"] + rows["numel"]
    assert begin[1:].tolist() == end[:-1].tolist()
    last = cuda_stream.table([whole._replace(wanted=Slice(numel - 5, numel))], GpuProperties(132, 2048))[0]
    assert len(last) == 1 and last["begin"][0] == begin[-1] and last["offset"][0] == rows["offset"][-1]
    assert units >= numel / 4096
