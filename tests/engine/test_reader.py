import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import firstloss as fl
from firstloss.engine import plan
from firstloss.engine.cpu_engine import materialize_whole
from firstloss.engine.reader import Reader, WholeValueCache
from firstloss.engine.sampler import StreamSampler
from firstloss.program.graph import Ref


def refuse(value):
    raise AssertionError(f"a value of shape {value.shape} was made whole")


def normal(shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype).normal_(0.5, 0.02)


def uniform():
    return torch.empty(300, 501).uniform_(-1, 2)


def embedding():
    table = normal((100, 64))
    table[3].zero_()
    return table


def scaled():
    table = normal((257, 33))
    table.mul_(0.3).add_(1).clamp_(-0.1, 2)
    table[10:20].fill_(7)
    return table


def half():
    return normal((400, 50)).to(torch.bfloat16)


def two_halves():
    table = torch.zeros(200, 100)
    table[:90].uniform_(0, 1)
    table[100:].copy_(normal((100, 100)))
    return table


def filled_twice():
    """As FSDP does with a padded shard that is initialized again after sharding, then edited."""
    table = torch.zeros(210, 100)
    shard = table[:200]
    shard.copy_(normal((200, 100)))
    shard[:3].zero_()
    shard.copy_(normal((900, 100))[300:500]).mul_(2)
    table[50:60].copy_(shard[:10])
    table[50:55].uniform_(3, 4)
    table[52:53].fill_(1)
    table[:40].uniform_(1, 2)
    return table


def moved_within():
    table = normal((100, 100))
    table[:30].copy_(table[60:90])
    table.mul_(table)
    return table


def factories():
    return torch.rand(3000) + torch.ones(3000) * torch.full((3000,), 3.0)


def truncated():
    torch.nn.init.trunc_normal_(torch.empty(70_001), std=1, a=-1, b=1)
    return torch.nn.init.trunc_normal_(torch.empty(130, 1001), std=0.7, a=-1, b=1.5).mul_(0.5)


def by_erfinv():
    return torch.empty(300, 300).uniform_(-0.9, 0.9).erfinv_().mul_(0.02)


def experts():
    """As transformers joins the matrices of experts that a checkpoint has one by one."""
    gates, ups = ([normal((40, 60)) for _ in range(3)] for _ in range(2))
    return torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)


def one_above_the_other():
    return torch.cat([normal((30, 50)), torch.empty(0), normal((70, 50)), torch.ones(21, 50)], dim=-2).mul_(0.5)


CUTTABLE = {
    "experts": experts,
    "one above the other": one_above_the_other,
    "truncated": truncated,
    "by erfinv": by_erfinv,
    "normal": lambda: normal((1000, 100)),
    "ragged": lambda: normal(100_003),
    "bfloat16": lambda: normal((777, 3), torch.bfloat16),
    "float64": lambda: normal((777, 3), torch.float64),
    "uniform": uniform,
    "filled twice": filled_twice,
    "embedding": embedding,
    "scaled": scaled,
    "half": half,
    "two halves": two_halves,
    "moved within": moved_within,
    "factories": factories,
}


def tanh():
    return normal((100, 100)).tanh_()


def transposed():
    return normal((100, 30)).t().contiguous()


def summed():
    return normal((100, 100)).cumsum(0)


def joined():
    table = normal((40, 30))
    return torch.cat([table[:7, 3:9], table[20:, :6], torch.empty(0), table[3:5, ::5]]).clone()


def short():
    return normal(7)


WHOLE = {"tanh": tanh, "transposed": transposed, "summed": summed, "joined": joined, "short": short}


def both(make):
    torch.manual_seed(3)
    torch.rand(1000)
    expected = make()
    torch.manual_seed(3)
    with fl.deferred():
        torch.rand(1000)
        tensor = make()
    return expected, tensor


@pytest.mark.parametrize("name", [*CUTTABLE, *WHOLE])
@settings(max_examples=25)
@given(data=st.data())
def test_a_range_matches_the_slice_of_the_whole(name, data):
    expected, tensor = both({**CUTTABLE, **WHOLE}[name])
    value = tensor._storage.value
    reader = Reader(refuse if name in CUTTABLE else WholeValueCache(materialize_whole))
    for _ in range(3):
        begin = data.draw(st.integers(0, value.numel))
        end = data.draw(st.integers(begin, value.numel))
        out = torch.empty(end - begin, dtype=value.dtype)
        reader.window(value, begin, end, out)
        assert torch.equal(out, expected.reshape(-1)[begin:end])


@st.composite
def joins(draw, shape=None, depth=2):
    """A function that joins tensors of random shapes, which may be joined from others."""
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))) + (draw(st.integers(20, 40)),)
    if depth == 0 or (kind := draw(st.sampled_from(["leaf", "cat", "stack"]))) == "leaf":
        return lambda: normal(shape)
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "stack" and shape[dim]:
        parts = [draw(joins(shape[:dim] + shape[dim + 1 :] or (1,), depth - 1)) for _ in range(shape[dim])]
        return lambda: torch.stack([part() for part in parts], dim).reshape(shape)
    cut = draw(st.integers(0, shape[dim]))
    sizes = [(*shape[:dim], n, *shape[dim + 1 :]) for n in (cut, shape[dim] - cut)]
    parts = [draw(joins(size, depth - 1)) for size in sizes]
    return lambda: torch.cat([part() for part in parts], dim - len(shape))


@settings(max_examples=150)
@given(make=joins(), data=st.data(), row=st.sampled_from([1, 1 << 10]))
def test_a_range_of_joined_tensors_matches_the_slice_of_the_whole(make, data, row):
    expected, tensor = both(make)
    value = tensor._ref().value
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plan, "_MIN_ROW", row)  # shorter rows are joined in the whole
        reader = Reader(WholeValueCache(materialize_whole))
        begin = data.draw(st.integers(0, value.numel))
        end = data.draw(st.integers(begin, value.numel))
        out = torch.empty(end - begin)
        reader.window(value, begin, end, out)
    assert torch.equal(out, expected.reshape(-1)[begin:end])


@pytest.mark.parametrize("name", [*CUTTABLE, *WHOLE])
def test_a_whole_value_can_be_read(name):
    expected, tensor = both({**CUTTABLE, **WHOLE}[name])
    out = torch.empty_like(expected)
    Reader(WholeValueCache(materialize_whole)).materialize_whole(tensor._storage.value, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[10:40],
        lambda t: t[:, 5:9],
        lambda t: t.t(),
        lambda t: t[::3, ::2],
        lambda t: t[7],
        lambda t: t[:, 7],
        lambda t: t[5:5],
    ],
)
def test_reading_through_a_view_computes_what_it_shows(view):
    expected, tensor = both(lambda: normal((100, 48)))
    with fl.deferred():
        seen = view(tensor)
    out = torch.empty(seen.shape)
    Reader(refuse).materialize(seen._ref(), None, out)
    assert torch.equal(out, view(expected))


def test_a_column_block_is_made_in_blocks_of_rows(monkeypatch):
    monkeypatch.setattr("firstloss.engine.reader._BLOCK_BYTES", 4000)
    expected, tensor = both(lambda: normal((100, 48)))
    with fl.deferred():
        shard = tensor[:, 12:24].clone()
    reader = Reader(refuse)
    longest = 0
    window = reader.window

    def watched(value, begin, end, out):
        nonlocal longest
        if value is tensor._storage.value:
            longest = max(longest, end - begin)
        window(value, begin, end, out)

    monkeypatch.setattr(reader, "window", watched)
    out = torch.empty(100, 12)
    reader.materialize_whole(shard._storage.value, out)
    assert torch.equal(out, expected[:, 12:24])
    assert 0 < longest <= 1000


def test_consecutive_ranges_need_one_jump(monkeypatch):
    _, tensor = both(lambda: normal(1 << 20))
    value = tensor._storage.value
    reader = Reader(refuse)
    stream = type(value.node.draw.stream)
    real, seeks = stream.state_at, []

    def watched(self, position):
        seeks.append(position)
        return real(self, position)

    monkeypatch.setattr(stream, "state_at", watched)
    for begin in range(0, 1 << 20, 1 << 17):
        reader.window(value, begin, begin + (1 << 17), torch.empty(1 << 17))
    assert len(seeks) == 1


def test_concatenated_parts_are_made_without_the_whole():
    expected, tensor = both(joined)
    out = torch.empty_like(expected)
    Reader(refuse).materialize_whole(tensor._storage.value, out)
    assert torch.equal(out, expected)


def test_a_read_under_another_dtype_needs_the_whole():
    expected, tensor = both(lambda: normal((8, 8)))
    value = tensor._storage.value
    out = torch.empty(8, 8, dtype=torch.int32)
    Reader(WholeValueCache(materialize_whole)).materialize(Ref(value, (8, 8), (8, 1), 0, torch.int32), None, out)
    assert torch.equal(out, expected.view(torch.int32))


def test_an_edited_constant_is_an_error():
    constant = torch.rand(1000, 1000)
    with fl.deferred():
        kept = torch.empty(1000, 1000).copy_(constant)
    constant.add_(1)
    with pytest.raises(fl.errors.ConstantChangedError):
        Reader(refuse).materialize_whole(kept._storage.value, torch.empty(1000, 1000))


def test_overwritten_values_are_not_drawn(monkeypatch):
    """FSDP pads a shard and initializes it again after sharding, so the constructor's fill is dead."""

    def make():
        first, second = torch.empty(900, 100).normal_(), torch.empty(900, 100).uniform_()
        padded = torch.zeros(310, 100)
        padded[:300].copy_(first[300:600])
        padded[:300].copy_(second[300:600])
        return padded

    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    deferred = fl.deferred_init(make)
    drawn = []
    draw = StreamSampler.fill
    monkeypatch.setattr(StreamSampler, "fill", lambda self, name, *rest: (drawn.append(name), draw(self, name, *rest)))
    fl.materialize_tensor(deferred)
    assert torch.equal(deferred, eager)
    assert set(drawn) == {"uniform"}
