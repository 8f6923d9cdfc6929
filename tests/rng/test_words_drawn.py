"""The experiments behind `firstloss.rng.words_drawn`: the number of words that torch draws against the table."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstloss.rng import Position, Stream, words_drawn

# Bounds beyond a floating dtype's precision warn; they are included because the range decides how many words are drawn.
pytestmark = pytest.mark.filterwarnings("ignore:.*out of bounds")

SIZES = [0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 1000, 65537]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
SIGNED = ["int8", "int16", "int32", "int64"]
INTEGERS = ["uint8", *SIGNED]
Fill = Callable[[torch.Tensor, torch.Generator], object]

# (name in the table, dtypes, the operation on a tensor, its arguments)
FILLS: list[tuple[str, list[str], Fill, dict]] = [
    ("uniform", FLOATS + COMPLEX, lambda t, g: t.uniform_(generator=g), {}),
    ("uniform", FLOATS, lambda t, g: t.uniform_(-3, 5, generator=g), {"from_": -3.0, "to": 5.0}),
    ("normal", FLOATS + COMPLEX, lambda t, g: t.normal_(generator=g), {}),
    ("normal", FLOATS, lambda t, g: t.normal_(2, 0.02, generator=g), {"mean": 2.0, "std": 0.02}),
    ("log_normal", FLOATS, lambda t, g: t.log_normal_(generator=g), {}),
    ("exponential", FLOATS, lambda t, g: t.exponential_(2.0, generator=g), {"lambd": 2.0}),
    ("cauchy", FLOATS, lambda t, g: t.cauchy_(generator=g), {}),
    ("geometric", FLOATS + INTEGERS, lambda t, g: t.geometric_(0.3, generator=g), {"p": 0.3}),
    ("bernoulli", FLOATS + INTEGERS + ["bool"], lambda t, g: t.bernoulli_(0.3, generator=g), {"p": 0.3}),
    ("bernoulli", ["float64"], lambda t, g: t.bernoulli_(generator=g), {}),
    *(
        (
            "bernoulli",
            FLOATS + INTEGERS + ["bool"],
            lambda t, g, p=p: t.bernoulli_(torch.tensor(0.25, dtype=getattr(torch, p)), generator=g),
            {"p_dtype": p},
        )
        for p in FLOATS
    ),
    ("random", FLOATS + INTEGERS + ["bool"], lambda t, g: t.random_(generator=g), {}),
    ("random", FLOATS + INTEGERS, lambda t, g: t.random_(100, generator=g), {"to": 100}),
    ("random", ["bool"], lambda t, g: t.random_(0, 2, generator=g), {"from_": 0, "to": 2}),
    *(
        ("random", dtypes, lambda t, g, a=a, b=b: t.random_(a, b, generator=g), {"from_": a, "to": b})
        for dtypes, a, b in [
            (FLOATS + SIGNED, -100, 27),
            (["int32", "int64"], 0, (1 << 28) - 1),
            (["int32", "int64"], 0, 1 << 28),
            (["int32", "int64"], -(1 << 27), 1 << 27),
            (["float32", "float64"], -5, (1 << 28) - 6),
            (["float32", "float64"], 1 << 27, (1 << 28) + 3),
            (["int64"], 0, 1 << 32),
            (["int64"], -(1 << 62), 1 << 62),
        ]
    ),
    ("random", ["int64"], lambda t, g: t.random_(-(1 << 63), None, generator=g), {"from_": -(1 << 63)}),
    ("random", ["int64"], lambda t, g: t.random_((1 << 63) - 9, None, generator=g), {"from_": (1 << 63) - 9}),
    ("random", INTEGERS, lambda t, g: t.random_(3, None, generator=g), {"from_": 3}),
    ("random", INTEGERS, lambda t, g: t.random_(0, None, generator=g), {"from_": 0}),
]
CASES = [
    pytest.param(op, dtype, fill, args, id=f"{op}-{dtype}-{args}")
    for op, dtypes, fill, args in FILLS
    for dtype in dtypes
]


def seeded(spare: bool, seed: int = 11) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    if spare:
        torch.empty(1).normal_(generator=generator)
    return generator


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def check_stands_where_predicted(
    stream: Stream, drawn: words_drawn.WordsDrawn | None, generator: torch.Generator
) -> None:
    """The generator continues like a fresh one at the predicted position, and its state has the same bytes."""
    assert drawn is not None
    predicted = words_drawn.advance(stream.start, drawn)
    state = torch.from_numpy(stream.state_at(predicted))
    fresh = torch.Generator()
    fresh.set_state(state)
    assert torch.equal(state, generator.get_state())
    for _ in range(2):
        assert torch.equal(*(torch.empty(3).normal_(generator=g) for g in (fresh, generator)))
        assert torch.equal(*(torch.empty(5, dtype=torch.int64).random_(generator=g) for g in (fresh, generator)))


def layouts(numel: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {"contiguous": torch.zeros(numel, dtype=dtype), "strided": torch.zeros(2 * numel, dtype=dtype)[::2]}
    for rows in (3, 4):
        if numel % rows == 0 and numel:
            tensors[f"transposed{rows}"] = torch.zeros(numel // rows, rows, dtype=dtype).t()
            tensors[f"matrix{rows}"] = torch.zeros(rows, numel // rows, dtype=dtype)
    if numel % 8 == 0 and numel:
        tensors["channels last"] = torch.zeros(1, 4, 2, numel // 8, dtype=dtype).contiguous(
            memory_format=torch.channels_last
        )
    return tensors


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("op, dtype, fill, args", CASES)
def test_in_place_fills_draw_what_the_table_says(op, dtype, fill, args, spare):
    for numel in SIZES:
        for tensor in layouts(numel, getattr(torch, dtype)).values():
            generator = seeded(spare)
            stream = Stream.from_state(generator.get_state().numpy())
            fill(tensor, generator)
            drawn = words_drawn.draw(op, dtype, numel, contiguous=tensor.is_contiguous(), spare=spare, **args)
            check_stands_where_predicted(stream, drawn, generator)


FACTORIES = [
    *(("rand", d, lambda n, d, g: torch.rand(n, dtype=d, generator=g), {}) for d in FLOATS + COMPLEX),
    *(("randn", d, lambda n, d, g: torch.randn(n, dtype=d, generator=g), {}) for d in FLOATS + COMPLEX),
    *(
        ("randint", d, lambda n, d, g: torch.randint(7, (n,), dtype=d, generator=g), {"high": 7})
        for d in FLOATS + INTEGERS
    ),
    *(
        (
            "randint",
            d,
            lambda n, d, g: torch.randint(-4, 1 << 30, (n,), dtype=d, generator=g),
            {"low": -4, "high": 1 << 30},
        )
        for d in ("int32", "int64")
    ),
    *(
        ("randperm", d, lambda n, d, g: torch.randperm(n, dtype=d, generator=g), {})
        for d in ("int32", "int64", "float32", "float64")
    ),
    *(
        ("normal", d, lambda n, d, g: torch.normal(torch.ones(n, dtype=d), 2.0, generator=g), {"std": 2.0})
        for d in FLOATS + COMPLEX
    ),
    *(
        ("normal", d, lambda n, d, g: torch.normal(1.0, torch.ones(n, dtype=d), generator=g), {"mean": 1.0})
        for d in FLOATS
    ),
    *(
        ("normal", d, lambda n, d, g: torch.normal(*torch.ones(2, n, dtype=d), generator=g), {"mean_dtype": d})
        for d in FLOATS
    ),
    *(("normal", d, lambda n, d, g: torch.normal(1.0, 2.0, (n,), dtype=d, generator=g), {"std": 2.0}) for d in FLOATS),
    *(
        ("bernoulli", d, lambda n, d, g: torch.bernoulli(torch.ones(n, dtype=d), 0.5, generator=g), {"p": 0.5})
        for d in FLOATS
    ),
    ("bernoulli", "float64", lambda n, d, g: torch.bernoulli(torch.ones(n, dtype=d), generator=g), {}),
]


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("op, dtype, make, args", [pytest.param(*f, id=f"{f[0]}-{f[1]}-{f[3]}") for f in FACTORIES])
def test_factories_draw_what_the_table_says(op, dtype, make, args, spare):
    for numel in SIZES:
        generator = seeded(spare)
        stream = Stream.from_state(generator.get_state().numpy())
        tensor = make(numel, getattr(torch, dtype), generator)
        assert tensor.numel() == numel and tensor.is_contiguous()
        check_stands_where_predicted(stream, words_drawn.draw(op, dtype, numel, spare=spare, **args), generator)


# Operations without a generator argument draw from the global one.
GLOBAL = [
    *(("rand_like", d, lambda x: torch.rand_like(x), {}) for d in FLOATS),
    *(("randn_like", d, lambda x: torch.randn_like(x), {}) for d in FLOATS),
    *(("randint_like", d, lambda x: torch.randint_like(x, 2, 9), {"low": 2, "high": 9}) for d in FLOATS + INTEGERS),
    *(
        ("native_dropout", d, lambda x, p=p: torch.native_dropout(x, p, True), {"p": p, "train": True})
        for d in FLOATS
        for p in (0.0, 0.4, 1.0)
    ),
    *(("native_dropout", d, lambda x: torch.native_dropout(x, 0.4, False), {"p": 0.4, "train": False}) for d in FLOATS),
]


@pytest.mark.parametrize("op, dtype, make, args", [pytest.param(*f, id=f"{f[0]}-{f[1]}-{f[3]}") for f in GLOBAL])
def test_the_global_generator_draws_what_the_table_says(op, dtype, make, args):
    for numel in SIZES:
        for like in layouts(numel, getattr(torch, dtype)).values():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                stream = Stream.from_state(torch.get_rng_state().numpy())
                tensor = make(like)
                tensor = tensor if isinstance(tensor, torch.Tensor) else tensor[0]
                drawn = words_drawn.draw(op, dtype, numel, contiguous=tensor.is_contiguous(), **args)
                check_stands_where_predicted(stream, drawn, torch.default_generator)


@pytest.mark.parametrize(
    "op, dtype, args",
    [
        ("poisson", "float32", {}),
        ("binomial", "float32", {}),
        ("_standard_gamma", "float32", {}),
        ("multinomial", "int64", {"num_samples": 3}),
        ("rrelu_with_noise", "float32", {"training": True}),
        ("bernoulli", "float32", {}),  # bernoulli_() draws doubles, bernoulli(self) floats
        ("bernoulli", "float32", {"p_dtype": "int64"}),
        ("randint", "int64", {"low_dtype": "int64", "high_dtype": "int64"}),
        ("random", "float32", {"from_": 0, "to": 1 << 28}),  # becomes 2^28 - 16
        ("random", "float32", {"from_": 3}),
        ("exponential", "int64", {}),
        ("normal", "int64", {}),
        ("uniform", "bool", {}),
        ("randperm", "int64", {}),
    ],
)
def test_unproved_operations_have_no_rule(op, dtype, args):
    assert words_drawn.draw(op, dtype, 1 << 28 if op == "randperm" else 100, **args) is None


def test_sequences_draw_what_the_table_says():
    """Operations that leave or use the cached normal, one after another, recorded only as positions."""
    generator = seeded(False)
    stream = Stream.from_state(generator.get_state().numpy())
    position = stream.start
    choose = np.random.default_rng(0)
    for _ in range(300):
        op, dtypes, fill, args = FILLS[choose.integers(len(FILLS))]
        dtype = dtypes[choose.integers(len(dtypes))]
        numel = int(choose.choice([0, 1, 2, 3, 5, 15, 16, 17, 40]))
        contiguous = bool(choose.integers(2)) or numel < 2
        fill(torch.zeros(numel if contiguous else 2 * numel, dtype=getattr(torch, dtype))[:: 2 - contiguous], generator)
        drawn = words_drawn.draw(op, dtype, numel, contiguous=contiguous, spare=position.spare is not None, **args)
        position = words_drawn.advance(position, drawn)
        assert np.array_equal(stream.state_at(position), generator.get_state().numpy()), (op, dtype, numel)


def split(
    fill: Fill, op: str, dtype: str, args: dict, numel: int, cuts: list[int], seed: int, spare: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A fill of `numel` elements as a whole, and in pieces between the cuts, the last piece first."""
    generator = seeded(spare, seed)
    stream = Stream.from_state(generator.get_state().numpy())
    whole = torch.zeros(numel, dtype=getattr(torch, dtype))
    pieces = torch.ones(numel, dtype=getattr(torch, dtype))
    fill(whole, generator)
    begins = [0, *cuts]
    for begin, end in reversed(list(zip(begins, [*cuts, numel], strict=True))):
        at = Position(stream.start.words + words_drawn.words_before(op, dtype, begin, **args), stream.start.spare)
        own = torch.Generator()
        own.set_state(torch.from_numpy(stream.state_at(at)))
        fill(pieces[begin:end], own)
    return whole, pieces


@pytest.mark.parametrize("op, dtype, fill, args", CASES)
@settings(max_examples=12)
@given(data=st.data())
def test_a_fill_in_pieces_matches_the_whole(op, dtype, fill, args, data):
    unit = words_drawn.granule(op, dtype, **args)
    if unit is None:
        assert op == "log_normal"
        return
    numel = data.draw(st.integers(words_drawn.MIN_PIECE, 3000), label="numel")
    last = (numel - words_drawn.MIN_PIECE) // unit
    multiples = sorted(data.draw(st.sets(st.integers(1, last), max_size=5), label="cuts")) if last else []
    cuts: list[int] = []
    for cut in (unit * m for m in multiples):
        if cut - (cuts[-1] if cuts else 0) >= words_drawn.MIN_PIECE:
            cuts.append(cut)
    spare = data.draw(st.booleans(), label="spare")
    whole, pieces = split(fill, op, dtype, args, numel, cuts, data.draw(st.integers(0, 99)), spare)
    assert bytes_of(whole) == bytes_of(pieces)


@pytest.mark.parametrize("op", ["normal", "uniform"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_large_fill_in_pieces_matches_the_whole(op, dtype):
    fill = {"normal": torch.Tensor.normal_, "uniform": torch.Tensor.uniform_}[op]
    numel = 1_000_003
    whole, pieces = split(
        lambda t, g: fill(t, 0.5, 2.5, generator=g), op, dtype, {}, numel, [160_000, 500_000, 999_984], 1, False
    )
    assert bytes_of(whole) == bytes_of(pieces)


def test_an_unaligned_piece_is_refused():
    with pytest.raises(ValueError, match="its granularity is 16"):
        words_drawn.words_before("normal", "float32", 24)
    with pytest.raises(ValueError, match="its granularity is None"):
        words_drawn.words_before("log_normal", "float32", 16)
