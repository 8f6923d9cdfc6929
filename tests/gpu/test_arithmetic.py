"""The kernels' arithmetic, compiled as C, is bit-identical to PyTorch's CPU kernels for all possible uniforms."""

import ctypes

import numpy as np
import pytest
import torch

from firstloss.gpu import kernels
from firstloss.rng import philox
from firstloss.rng.mt19937 import temper

from .emulated import address, compiler, library, vectorised

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler on this machine")


def as_int(x):
    return x.view(torch.int32)


def test_tables_match_the_compilers_layout():
    library().sizes.restype = ctypes.c_uint64
    assert [library().sizes(i) for i in range(3)] == [
        t.itemsize for t in (kernels.SEGMENT, kernels.CHUNK, kernels.LAUNCH)
    ]


def untempered(words):
    """The state words that temper to these outputs: `mt19937.temper`, inverted step by step."""
    y = words ^ (words >> np.uint32(18))
    y = y ^ ((y << np.uint32(15)) & np.uint32(0xEFC60000))
    x = y
    for _ in range(4):  # each round recovers seven more bits
        x = y ^ ((x << np.uint32(7)) & np.uint32(0x9D2C5680))
    y = x
    for _ in range(2):
        x = y ^ (x >> np.uint32(11))
    return x


LOW_HIGH = [(0.0, 1.0), (-0.03, 0.07), (2.0**23, 2.0**23 + 3), (-1.0, 1.0)]


@pytest.mark.parametrize("low, high", LOW_HIGH)
def test_all_uniforms_match_pytorch(low, high):
    """A float32 uniform is made of a word's lowest 24 bits. All are tested, against the formula of PyTorch's kernel in
    double precision, rounded once where the kernel rounds: product and sum are exact there."""
    actual = np.empty(1 << 24, np.float32)
    library().all_units(address(actual), ctypes.c_float(low), ctypes.c_float(high))
    unit = np.arange(1 << 24, dtype=np.float64) * 2.0**-24
    low32, high32 = np.float32(low), np.float32(high)
    # 24 bits times 24 bits, plus 24 bits: exact in longdouble's 64 if the exponents are close.
    expected = (unit.astype(np.longdouble) * np.longdouble(np.float32(high32 - low32)) + np.longdouble(low32)).astype(
        np.float32
    )
    expected[expected == high32] = low32
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.skipif(not vectorised(), reason="PyTorch's normals are not those of AVX2 on this machine")
@pytest.mark.parametrize("which", ["radius", "angle"])
def test_normals_of_all_uniforms_match_pytorch(which):
    """Each of the 2^24 uniforms as radius and as angle: `normal_` draws them from a generator state set for it."""
    mean, std = 0.25, 0.02
    step = 1 << 20
    for begin in range(0, 1 << 24, step):
        numbers = np.arange(begin, begin + step, dtype=np.uint32)
        # A fixed partner whose own rounding errors do not hide the other's.
        partner = np.full(step, 5_592_405 if which == "radius" else 9_000_001, np.uint32)
        first, second = (numbers, partner) if which == "radius" else (partner, numbers)
        words = np.stack([first.reshape(-1, 8), second.reshape(-1, 8)], 1).reshape(-1)
        expected = drawn_by_pytorch(words, mean, std).reshape(-1, 2, 8)
        u, v = (np.ascontiguousarray(x.astype(np.float32) * np.float32(2.0**-24)) for x in (first, second))
        c, s = np.empty(step, np.float32), np.empty(step, np.float32)
        library().all_normals(
            address(u),
            address(v),
            ctypes.c_int64(step),
            ctypes.c_float(mean),
            ctypes.c_float(std),
            address(c),
            address(s),
        )
        assert np.array_equal(c.view(np.uint32), expected[:, 0].reshape(-1).view(np.uint32)), begin
        assert np.array_equal(s.view(np.uint32), expected[:, 1].reshape(-1).view(np.uint32)), begin


def test_tempering_can_be_inverted():
    words = np.random.default_rng(1).integers(0, 1 << 32, 10_000, dtype=np.uint64).astype(np.uint32)
    assert np.array_equal(temper(untempered(words)), words)


def drawn_by_pytorch(words, mean, std):
    """PyTorch's normals for these words, drawn from a generator in a matching state: 608 at a time, from a block of
    624."""
    generator = torch.Generator().manual_seed(0)
    torch.empty(1, dtype=torch.int32).random_(generator=generator)
    state = generator.get_state().numpy()  # after one word of its block
    view = state.view("<u8")
    block = torch.empty(608)
    out = np.empty(len(words), np.float32)
    raw = untempered(words)
    for begin in range(0, len(words), 608):
        some = raw[begin : begin + 608]
        view[4 : 4 + len(some)] = some
        generator.set_state(torch.from_numpy(state))
        out[begin : begin + len(some)] = block.normal_(mean, std, generator=generator)[: len(some)].numpy()
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_half_precision_matches_pytorch(dtype):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 22, dtype=np.uint64).astype(np.uint32)
    halves = np.arange(1 << 16, dtype=np.uint16)
    exact = torch.from_numpy(halves.view(np.int16).copy()).view(dtype).float().numpy()
    # Each number of the dtype, the midpoints between them, and their neighbours.
    middles = exact.view(np.uint32)[:, None] + np.array(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001], np.uint32
    )
    tiny = np.arange(0x32000000, 0x39000000, 997, dtype=np.uint32)
    numbers = np.concatenate([bits, middles.reshape(-1), tiny, tiny | np.uint32(1 << 31)]).view(np.float32)
    expected = torch.from_numpy(numbers.copy()).to(dtype)
    actual = np.empty(len(numbers), np.uint16)
    kind = ctypes.c_uint32(kernels.DTYPES[dtype])
    library().to_half(address(numbers), address(actual), ctypes.c_int64(len(numbers)), kind)
    number = ~torch.isnan(expected)
    actual = torch.from_numpy(actual.view(np.int16))
    assert torch.equal(actual[number], expected.view(torch.int16)[number])
    assert torch.isnan(actual.view(dtype)[~number]).all()
    back = np.empty(1 << 16, np.float32)
    library().from_half(address(halves), address(back), ctypes.c_int64(1 << 16), kind)
    numbers = ~np.isnan(exact)
    assert np.array_equal(back[numbers].view(np.uint32), exact[numbers].view(np.uint32))


# Random123's known answers for philox4x32-10.
KNOWN = [
    (0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((1 << 64) - 1, (1 << 64) - 1, (1 << 64) - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize("key, low, high, expected", KNOWN)
def test_philox_gives_the_known_answers(key, low, high, expected):
    out = np.empty(4, np.uint32)
    library().philox_words(*map(ctypes.c_uint64, (key, low, high)), address(out))
    assert tuple(out.tolist()) == expected == tuple(philox.words(key, low, high).tolist())
