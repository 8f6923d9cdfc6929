"""Half precision in traced steps: dtypes, values, and cbfloat16's rounding."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import firstloss as fl


@pytest.fixture(autouse=True)
def float16_afterwards():
    yield
    fl.amp.set_half_dtype("float16")


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


torch.manual_seed(1)
X, Y = torch.randn(6, 8), torch.randn(6, 4)


def forward(model, x, y, region):
    """Losses, and the dtypes of the intermediate results."""
    with region():
        h = model(x)
        product = x @ x.T
        with torch.autocast("cpu", enabled=False):
            plain = x @ x.T
        with torch.autocast("cpu", dtype=torch.bfloat16):
            brain = x @ x.T
        loss = F.mse_loss(h, y)
        soft = torch.softmax(h, -1)
    outside = x @ x.T
    return loss, [t.dtype for t in (h, product, plain, brain, loss, soft, outside)]


REGIONS = {
    "torch, bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "torch, float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "ours": fl.amp.autocast,
    "ours, off": lambda: fl.amp.autocast(enabled=False),
}


@pytest.mark.parametrize("name", REGIONS)
def test_autocast_regions_match_eager_pytorch(name, backend):
    region = REGIONS[name]
    reference, model = build(), build()
    fl.amp.set_half_dtype("bfloat16")
    loss, dtypes = forward(reference, X, Y, region)
    loss.backward()
    compiled = fl.compile(model, backend)
    seen_dtypes = []

    @fl.trace
    def step(x, y):
        loss, dtypes = forward(compiled, x, y, region)
        seen_dtypes[:] = dtypes
        loss.backward()
        return loss, [p.grad for p in model.parameters()]

    result, gradients = step(X, Y)
    assert seen_dtypes == dtypes
    assert all(g.dtype == torch.float32 for g in gradients)
    # Products are rounded to 8 bits or more, and summed in another order. Gradients are sums of such roundings: 2**-8
    # of the largest, measured.
    assert float(result) == pytest.approx(float(loss.detach()), rel=2**-7)
    for actual, p in zip(gradients, reference.parameters(), strict=True):
        torch.testing.assert_close(actual.clone(), p.grad, rtol=2**-6, atol=2**-7 * float(p.grad.abs().max()))


def test_a_region_around_the_call_selects_the_step(backend):
    compiled = fl.compile(build(), backend)

    @fl.trace
    def step(x):
        return compiled(x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [step(X).dtype, step(X).dtype] == [torch.bfloat16] * 2
    assert step(X).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert step(X).dtype == torch.float16


def test_a_step_uses_the_chosen_half_precision(backend):
    @fl.trace
    def step(x):
        with fl.amp.autocast():
            return x @ x.T

    assert fl.amp.set_half_dtype("bfloat16") == torch.bfloat16
    assert step(X).dtype == torch.bfloat16
    assert fl.amp.set_half_dtype(torch.float16) == torch.float16
    assert step(X).dtype == torch.float16
    with pytest.raises(fl.errors.PrecisionError, match="cbfloat16"):
        fl.amp.set_half_dtype("float8")


# -- cbfloat16 --


def rounded(x):
    """The nearest number with 10 significant bits and an exponent from -30 to 31, ties to even; otherwise zero or
    infinity."""
    if x == 0 or not math.isfinite(x):
        return x
    mantissa, exponent = math.frexp(x)  # |mantissa| from 0.5 to 1
    y = math.ldexp(round(mantissa * 2**10), exponent - 10)
    if abs(y) >= 2.0**32:
        return math.copysign(math.inf, x)
    return y if abs(y) >= 2.0**-30 else math.copysign(0.0, x)


@settings(max_examples=300)
@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_cbfloat16_rounds_to_nearest(numbers):
    from firstloss.lower.cbfloat16 import round_cbfloat16

    actual = np.asarray(round_cbfloat16(np.array(numbers, np.float32)))
    expected = np.array([rounded(x) for x in numbers], np.float32)
    assert actual.tobytes() == expected.tobytes() or np.array_equal(actual, expected, equal_nan=True)


def cb16(values):
    return torch.tensor([rounded(float(v)) for v in values.flatten()]).reshape(values.shape)


def test_cbfloat16_products_round_operands_and_results(backend):
    """Operands are rounded, the exact product is rounded, and so are the gradients."""
    fl.amp.set_half_dtype("cbfloat16")
    weight = nn.Parameter(torch.tensor([[1.0], [1025.0], [70000.0], [3.0]]))
    holder = nn.Module()
    holder.weight = weight
    fl.compile(holder, backend)

    @fl.trace
    def step(x):
        with fl.amp.autocast():
            y = F.linear(x, weight)
            big = y * y
        y.float().sum().backward()
        return y, big, weight.grad

    x = torch.tensor([[1.0 + 2**-9], [1000.25]])
    y, big, gradient = step(x)
    expected = cb16(cb16(x) @ cb16(weight.detach().clone()).T)
    assert torch.equal(y.clone(), expected)
    assert y.clone()[0, 2] > 65504  # float16 would overflow here
    assert torch.equal(big.clone(), cb16(expected * expected))
    assert math.isinf(big.clone()[1, 2])
    assert torch.equal(gradient.clone(), cb16(cb16(x).sum(0)).expand(4, 1))
    assert y.dtype == torch.float32  # nothing is float16 any more


def test_a_cbfloat16_model_stays_close_to_float32(backend):
    fl.amp.set_half_dtype("cbfloat16")
    reference, model = build(), build()
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @fl.trace
    def step(x, y):
        with fl.amp.autocast():
            loss = F.mse_loss(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [float(step(X, Y)) for _ in range(3)]
    assert losses[0] == pytest.approx(float(F.mse_loss(reference(X), Y).detach()), rel=2**-8)  # bfloat16
    assert losses[2] < losses[1] < losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_cbfloat16_outside_of_a_traced_step_is_refused(backend):
    fl.amp.set_half_dtype("cbfloat16")
    with pytest.raises(fl.errors.PrecisionError, match="bfloat16"), fl.amp.autocast():
        pass
    kept = torch.zeros(3, 3, dtype=torch.float16)

    @fl.trace
    def step(x):
        with fl.amp.autocast():
            kept.copy_(x @ x)

    with pytest.raises(fl.errors.LoweringError, match="float32"):
        step(torch.ones(3, 3))

    @fl.trace
    def bits(x):
        with fl.amp.autocast():
            return (x @ x).view(torch.int16)

    with pytest.raises(fl.errors.LoweringError, match="bits"):
        bits(torch.ones(3, 3))


def test_precision_and_optimizers_do_not_import_jax():
    code = (
        "import sys, firstloss as fl; fl.amp.GradScaler; fl.optim.lr_scheduler.LinearLR; sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
