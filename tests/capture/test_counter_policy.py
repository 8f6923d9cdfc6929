"""rng="counter": draws depend only on (seed, draw, index), whichever way they are computed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.capture import session
from firstloss.engine.cpu_engine import materialize_values
from firstloss.engine.reader import Reader
from firstloss.rng import counter
from firstloss.rng.counter_stream import CounterStream

SEED = CounterStream(torch.Generator().manual_seed(3).get_state().numpy()).seed


def capture(fn, seed=3):
    torch.manual_seed(seed)
    with fl.deferred(rng="counter"):
        return fn()


def materialized(fn, seed=3):
    deferred = capture(fn, seed)
    return (
        [fl.materialize_tensor(t) for t in deferred] if isinstance(deferred, list) else fl.materialize_tensor(deferred)
    )


@pytest.fixture(params=["native", "numpy"])
def kernels(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(counter, "has_kernels", lambda: False)
    elif not counter.has_kernels():
        pytest.skip("the C kernels were not built: no C compiler")


def test_each_draw_depends_on_its_number(kernels):
    first, second, third = materialized(lambda: [torch.randn(33), torch.empty(7, 5).uniform_(-0.5, 0.5), torch.rand(3)])
    assert np.array_equal(first.numpy(), counter.normal(SEED, 0, 0, 33))
    assert np.array_equal(second.flatten().numpy(), counter.uniform(SEED, 1, 0, 35, -0.5, 0.5))
    assert np.array_equal(third.numpy(), counter.uniform(SEED, 2, 0, 3))


def everything():
    table = torch.zeros(40, 30)
    nn.init.normal_(table[:, ::2], std=2.0)
    skewed = torch.empty(6, 4, 5, 5).to(memory_format=torch.channels_last)
    return [
        nn.init.trunc_normal_(torch.empty(50, 60), std=0.02, a=-0.03, b=0.05),
        nn.init.trunc_normal_(torch.empty(50, 60)),
        nn.init.trunc_normal_(torch.empty(30, dtype=torch.bfloat16), 1.0, 1.0, 0.0, 1.5),
        nn.init.trunc_normal_(torch.empty(200), 0.0, 1.0, 3.0, 4.0),
        nn.init.orthogonal_(torch.empty(9, 5)),
        nn.init.xavier_normal_(torch.empty(20, 30, dtype=torch.float16)),
        nn.init.uniform_(torch.empty(99, dtype=torch.bfloat16), 0.0, 1.0),
        nn.init.normal_(torch.empty(9, 9, dtype=torch.float64), 1.0),
        torch.rand(5, dtype=torch.float64),
        torch.randn(8, 2, dtype=torch.complex64),
        torch.randint(100, (50,)),
        torch.randperm(20),
        torch.empty(60).bernoulli_(0.3),
        torch.empty(60).exponential_(),
        torch.multinomial(torch.ones(10), 4),
        torch.normal(torch.zeros(9), torch.ones(9)),
        torch.normal(2.0, 3.0, (9,)),
        nn.functional.dropout(torch.ones(40), 0.5),
        nn.init.normal_(skewed),
        table,
        torch.randn(3, generator=torch.Generator().manual_seed(9)),
    ]


@pytest.mark.filterwarnings("ignore:mean is more than 2 std")
def test_order_threads_and_kernels_do_not_matter(kernels):
    whole = materialized(everything)
    again = capture(everything)
    for tensor in reversed(again):
        fl.materialize_tensor(tensor)
    holder = nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in capture(everything))
    fl.materialize_module(holder, num_threads=3)
    for a, b, c in zip(whole, again, holder, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_large_fill_can_be_made_in_pieces(threads):
    count = (1 << 19) + 77
    deferred = capture(lambda: torch.empty(count).normal_(1.0, 0.1))
    value = deferred._storage.value
    (buffer,) = materialize_values([value], num_threads=threads).values()
    assert np.array_equal(buffer.numpy(), counter.normal(SEED, 0, 0, count, 1.0, 0.1))
    del deferred


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("kind", ["normal_", "uniform_"])
def test_slices_match_the_whole(kind, dtype):
    deferred = capture(lambda: getattr(torch.empty(5000, dtype=dtype), kind)())
    value = deferred._storage.value
    whole = fl.materialize_tensor(deferred)
    reader = Reader(lambda value: pytest.fail("made whole"))
    for begin, end in ((0, 5000), (1, 2), (17, 4999), (4990, 5000), (2503, 2507)):
        part = torch.empty(end - begin, dtype=dtype)
        reader.window(value, begin, end, part)
        assert torch.equal(part, whole[begin:end]), (begin, end)


def test_a_slice_draws_only_its_own_words(monkeypatch):
    drawn = []
    real = counter.normal
    monkeypatch.setattr(
        counter,
        "normal",
        lambda seed, draw, begin, count, *a, **k: drawn.append(count) or real(seed, draw, begin, count, *a, **k),
    )
    deferred = capture(lambda: torch.empty(1 << 40).normal_())  # 4 TB, of which a hundred elements are computed
    part = deferred[(1 << 39) + 3 :][:100].clone()
    assert np.array_equal(fl.materialize_tensor(part).numpy(), real(SEED, 0, (1 << 39) + 3, 100))
    assert sum(drawn) <= 200


def test_truncated_normals_have_their_distribution():
    inside = materialized(lambda: nn.init.trunc_normal_(torch.empty(200_000), 1.0, 2.0, 0.0, 4.0))
    assert 0 <= inside.min() and inside.max() <= 4
    below = [(1 + math.erf(x / math.sqrt(2))) / 2 for x in (-0.5, 0.0, 1.5)]
    share = (below[1] - below[0]) / (below[2] - below[0])
    assert abs((inside < 1).float().mean().item() - share) < 0.005  # four standard deviations of the estimate
    assert len(inside.unique()) > 190_000


def test_nothing_is_computed_before_it_is_read(monkeypatch):
    monkeypatch.setattr(counter, "normal", lambda *a, **k: pytest.fail("drawn"))
    module = capture(lambda: nn.Sequential(nn.Linear(1000, 1000), nn.Linear(10, 10)))
    module.apply(lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None)
    fl.materialize_module(module)


def test_the_seed_comes_from_the_generator_and_later_blocks_continue():
    a, b = materialized(lambda: torch.randn(9)), materialized(lambda: torch.randn(9), seed=4)
    torch.manual_seed(3)
    with fl.deferred(rng="counter"):
        first = torch.randn(9)
    after = torch.get_rng_state()
    assert torch.initial_seed() == 3
    with fl.deferred(rng="counter"):
        second = torch.randn(9)
    assert torch.equal(fl.materialize_tensor(first), a)
    assert len({tuple(t.tolist()) for t in (a, b, fl.materialize_tensor(second))}) == 3
    capture(lambda: torch.randn(9000))  # the generator's final state depends only on the number of draws
    assert torch.equal(torch.get_rng_state(), after)


def test_reseeding_forking_and_reading_work_inside_a_block():
    def fn():
        torch.randn(5)
        torch.manual_seed(3)
        again = torch.randn(9)
        with torch.random.fork_rng(devices=[]):
            forked = torch.randn(4)
        after = torch.randn(4)
        read = torch.randn(3).sum().item()
        return [again, forked, after, torch.full((1,), read)]

    first, second = materialized(fn), materialized(fn, seed=5)
    assert torch.equal(first[0], materialized(lambda: torch.randn(9)))
    assert torch.equal(first[1], first[2])  # as in eager PyTorch
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_nested_blocks_must_have_one_policy():
    with fl.deferred(rng="counter"):
        torch.manual_seed(3)
        inner = fl.deferred_init(lambda: torch.randn(9))
        with pytest.raises(fl.errors.CaptureError, match=r"test_counter_policy.py:\d+: rng='eager' inside"):
            with fl.deferred(rng="eager"):
                pass
    assert torch.equal(fl.materialize_tensor(inner), materialized(lambda: torch.randn(9)))
    assert session.generators.policy == "eager"
    torch.manual_seed(3)
    assert torch.equal(
        fl.materialize_tensor(fl.deferred_init(lambda: torch.randn(9))),
        torch.randn(9, generator=torch.Generator().manual_seed(3)),
    )


def test_the_report_lists_draws():
    module = capture(lambda: nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 4)))
    assert [row.position for row in fl.init_program(module).report().rows] == [0, 1, 2, 3]


def test_invalid_draws_are_refused_as_by_torch():
    with pytest.raises(RuntimeError, match="std"):
        materialized(lambda: torch.empty(9).normal_(0.0, -1.0))


def test_saved_weights_match_materialized_ones(tmp_path):
    from safetensors.torch import load_file

    def build():
        return nn.Sequential(nn.Linear(300, 200), nn.Embedding(50, 7, padding_idx=2))

    fl.save_initialized(capture(build), tmp_path)
    module = capture(build)
    fl.materialize_module(module)
    saved = load_file(tmp_path / "model.safetensors")
    for name, tensor in module.state_dict().items():
        assert torch.equal(saved[name], tensor), name
