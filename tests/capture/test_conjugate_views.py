"""Conjugate and negative views are views: writes to them or to their base are visible in both."""

import random

import pytest
import torch
from torch import nn

import firstloss as fl

from .eager_comparison import assert_same, deferred, eager, materialize

VIEWS = ["{t}.conj()", "{t}.conj()[1:]", "{t}[::2].conj()", "{t}.t().conj()", "{t}.adjoint()", "{t}.detach().conj()"]
VIEWS += ["{t}.conj().imag", "{t}.imag", "torch._neg_view({t})", "{t}.conj().real", "{t}.reshape(-1)", "{t}.mH[:1]"]
VIEWS += ["{t}.conj().resolve_conj()", "torch.resolve_neg({t}.conj().imag)"]
EDITS = [
    "{t}.mul_(2)",
    "{t}[0].fill_(3)",
    "{t}.add_(a.flatten()[0])",
    "{t}.zero_()",
    "{t}.copy_({t} * 1j)",
    "{t}[..., 0] = 5",
]
EDITS += ["{t}.conj_physical_()", "{t}.neg_()"]


def statements(seed):
    """Statements that create views of complex tensors and write to some of them."""
    rng = random.Random(seed)
    lines, names = (
        [f"a = torch.view_as_complex(torch.arange(24.).reshape({rng.choice(['3, 4', '12', '2, 3, 2'])}, 2)) + 1"],
        ["a"],
    )
    for i in range(rng.randint(3, 8)):
        t = rng.choice(names)
        if rng.random() < 0.5:
            lines.append(f"b{i} = {rng.choice(VIEWS).format(t=t)}")
            names.append(f"b{i}")
        else:
            lines.append(rng.choice(EDITS).format(t=t))
    return lines


def run(lines, **variables):
    """The tensors of a program by name, and the statements that PyTorch accepts."""
    scope, done = {"torch": torch, **variables}, []
    for line in lines:
        try:
            exec(line, scope)
        except (RuntimeError, NameError, IndexError, TypeError):
            continue
        done.append(line)
    return {name: value for name, value in scope.items() if isinstance(value, torch.Tensor)}, done


def shown(tensor):
    """The numbers, with conjugate and negative bits resolved."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(plain) if plain.is_complex() else plain


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_views_in_a_constructor_match_eager(first):
    """The views have the values of eager PyTorch's, and still share memory when materialized."""
    for seed in range(first, first + 50):
        expected, lines = run(statements(seed))
        with fl.deferred():
            actual, _ = run(lines)
        for name in sorted(actual, key=lambda n: random.Random(f"{seed}{n}").random()):
            fl.materialize_tensor(actual[name])
        assert actual.keys() == expected.keys()
        for tensors in (expected, actual):
            last = tensors[sorted(tensors)[-1]]
            last.reshape(-1)[:1].mul_(3) if last.is_contiguous() else last.mul_(3)
        for name, tensor in actual.items():
            message = f"{name} of seed {seed}: " + "; ".join(lines)
            assert torch.equal(shown(tensor), shown(expected[name])), message
            assert (tensor.is_conj(), tensor.is_neg()) == (expected[name].is_conj(), expected[name].is_neg()), message
            assert (tensor.shape, tensor.stride()) == (expected[name].shape, expected[name].stride()), message


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_views_in_a_step_match_eager(first):
    """Views of tensors created in the step, and of an outside tensor that it edits."""
    for seed in range(first, first + 10):
        (line, *lines), rng = statements(seed), random.Random(seed)
        expected, lines = run(lines, a=eval(line.removeprefix("a = ")))
        model = fl.compile(nn.Linear(2, 2), fl.backend("XLA"))
        outside = rng.random() < 0.5
        kept = eval(line.removeprefix("a = "))

        @fl.trace
        def step(x):
            a = kept if outside else torch.view_as_complex(x)  # noqa: B023
            actual, _ = run(lines, a=a if outside else a + 0)  # noqa: B023
            return {name: shown(tensor) + 0 * model(torch.ones(2)).sum() for name, tensor in actual.items()}  # noqa: B023

        actual = step(torch.view_as_real(kept.clone()))
        for name, tensor in expected.items():
            assert torch.equal(actual[name], shown(tensor)), f"{name} of seed {seed}: " + "; ".join([line, *lines])
        if outside:
            assert torch.equal(shown(kept), shown(expected["a"])), f"seed {seed}: " + "; ".join([line, *lines])


def test_shape_changes_in_place_match_eager():
    """Autograd regenerates views from their base, which has another shape by then."""
    with (
        pytest.raises(
            fl.errors.CaptureError,
            match=r"test_conjugate_views.py:\d+.*changes the shape of a tensor that requires grad in place",
        ),
        fl.deferred(),
    ):
        computed = nn.Parameter(torch.randn(2, 3)) * 2
        row = computed[0]
        computed.t_()
        del row


def facts(tensors):
    """What autograd knows about the weight `p` and its views, and the effects of gradients and edits."""
    p, *views = tensors
    result = [(t.requires_grad, t.is_leaf, t._base is p, t.dtype, t.stride(), t.is_conj()) for t in tensors]
    for view in views:
        p.grad = None
        try:
            (view.abs() ** 2).sum().backward()
            result.append(None if p.grad is None else shown(p.grad).tolist())
        except RuntimeError as error:
            result.append(str(error).split(" is a view")[0][:30])
    p.requires_grad_(False)
    p.mul_(2)
    return [*result, *((t.requires_grad, shown(t).tolist()) for t in tensors)]


PARTS = {
    "real": "[torch.view_as_real(p)]",
    "imag": "[p.imag, p.real]",
    "conj": "[p.conj(), p.conj()[1:]]",
    "conj_imag": "[p.conj().imag]",
    "slice": "[p[1:], p[1:][1:]]",
    "no_grad": "[n, n.unsqueeze(0)]",
    "no_grad_imag": "[n.imag]",
    "no_grad_conj": "[n.conj()]",
    "detached": "[p.detach()[1:]]",
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("parts", PARTS)
def test_views_of_a_weight_stay_views(parts, frozen):
    """Views that a constructor keeps of a weight remain views of it, and gradients flow through them."""

    def build():
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(4, dtype=torch.complex64), requires_grad=not frozen)
        with torch.no_grad():
            n = p.reshape(-1)
        tensors = [p, *eval(PARTS[parts], {"p": p, "n": n, "torch": torch})]
        if frozen:
            p.requires_grad_(True)
        return tensors

    with fl.deferred():
        result = build()
    for tensor in reversed(result):
        fl.materialize_tensor(tensor)
    assert facts(result) == facts(build())


def test_views_of_a_weight_on_a_backend_stay_views():
    """The views share the weight's memory, which the step writes."""
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64) * 1j)
    model = fl.compile(layer, fl.backend("XLA"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    view = layer.weight.detach().conj()

    @fl.trace
    def step():
        loss = (layer.weight * layer.weight.conj()).real.sum() / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert model is not None
    assert step().item() == 1.5
    assert view.resolve_conj().tolist() == [0j] * 3
    view.fill_(1j)
    assert step().item() == 1.5


SHOWN = {
    "imag": lambda v: v.imag,
    "conj": lambda v: v.conj(),
    "conj imag": lambda v: v.conj().imag,
    "conj real": lambda v: v.conj().real,
    "twice": lambda v: v.conj().conj().imag,
    "neg": lambda v: torch._neg_view(v.real.clone()),
    "neg of a part": lambda v: torch._neg_view(v.real),
    "every second conj": lambda v: v.conj()[..., ::2],
    "every second imag": lambda v: v.conj().imag[..., 1::2],
    "conj transposed": lambda v: v.conj().mT,
    "imag transposed": lambda v: v.conj().imag.mT,
}
DRAWN = {
    "normal": lambda w: w.normal_(0.1, 0.5),
    "uniform": lambda w: w.uniform_(),
    "bernoulli": lambda w: w.bernoulli_(0.3),
    "exponential": lambda w: w.exponential_(),
    "truncated": lambda w: nn.init.trunc_normal_(w),
}


@pytest.mark.parametrize("shape", [(2, 2), (2, 17), (5, 6), (4, 4, 3)], ids=str)
@pytest.mark.parametrize("view", SHOWN)
def test_draws_into_a_view_leave_the_stream_where_eager_does(view, shape):
    """PyTorch draws into a contiguous copy of a conjugated or negated view."""

    def build(draw):
        whole = torch.randn(shape, dtype=torch.complex64)
        visible = SHOWN[view](whole)
        with torch.no_grad():
            draw(visible)
        return [whole.clone(), visible.resolve_neg().resolve_conj().clone(), torch.randn(3)]

    compared = 0
    for name, draw in DRAWN.items():
        try:
            expected, generator = eager(lambda draw=draw: build(draw))
        except (RuntimeError, NotImplementedError):  # only operations for complex or negated views, which are few
            continue
        compared += 1
        actual, left = deferred(lambda draw=draw: build(draw))
        materialize(actual)
        assert_same(expected, actual)
        assert generator == left, name
    assert compared
