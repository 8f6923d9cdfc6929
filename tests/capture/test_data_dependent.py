"""In a traced step, operations whose results depend on values are refused with a suggestion that works."""

import sys

import pytest
import torch
import torch.nn.functional as F

import firstloss as fl

X = torch.tensor([[3.0, -1.0, 2.0], [-1.0, 0.5, -4.0]])
IDS = torch.tensor([1, 2, 0, 1, 0])


def branch(x):
    if x[0, 0] > 0:
        return x
    return -x


def loop(x):
    while x.sum() > 0:
        x = x - 1


def asserted(x):
    assert torch.isfinite(x).all()


def added(x):
    x = x.clone()
    x[x > 0] += 1


# From Python 3.12 on, the position of a formatted text is that of its field.
FORMATTED = 'f"{x.sum():.3f}"' if sys.version_info < (3, 12) else "{x.sum():.3f}"

# The user's code; how the error names it; a phrase of the advice for this operation.
REFUSED = {
    "nonzero": (lambda x, i: x.nonzero(), "x.nonzero()", "nonzero_static"),
    "where": (lambda x, i: torch.where(x > 0), "torch.where(x > 0)", "three arguments"),
    "argwhere": (lambda x, i: torch.argwhere(x), "torch.argwhere(x)", "nonzero_static"),
    "mask": (lambda x, i: x[x > 0].mean(), "x[x > 0]", "mask.sum() for a mean"),
    "mask +=": (lambda x, i: added(x), "x[x > 0]", "x += torch.where(mask, v, 0)"),
    "masked_select": (lambda x, i: x.masked_select(x > 0), "x.masked_select(x > 0)", "torch.where(mask, x, 0)"),
    "unique": (lambda x, i: torch.unique(i), "torch.unique(i)", "s[1:] != s[:-1]"),
    "unique, counts": (lambda x, i: i.unique(return_counts=True), "i.unique(return_counts=True)", "neighbours"),
    "unique, dim": (lambda x, i: torch.unique(x, dim=0), "torch.unique(x, dim=0)", "neighbours"),
    "consecutive": (lambda x, i: i.unique_consecutive(), "i.unique_consecutive()", "neighbours"),
    "repeat": (lambda x, i: i.repeat_interleave(i), "i.repeat_interleave(i)", "output_size=n"),
    "bincount": (lambda x, i: torch.bincount(i, minlength=3), "torch.bincount(i, minlength=3)", "scatter_add"),
    "one_hot": (lambda x, i: F.one_hot(i), "F.one_hot(i)", "num_classes=n"),
    "to_sparse": (lambda x, i: x.to_sparse(), "x.to_sparse()", "dense"),
    "equal": (lambda x, i: torch.equal(x, -x), "torch.equal(x, -x)", "(a == b).all()"),
    "allclose": (lambda x, i: x.allclose(-x), "x.allclose(-x)", "torch.isclose(a, b).all()"),
    "item": (lambda x, i: x.sum().item(), "x.sum().item()", "fl.step_closure"),
    "float": (lambda x, i: float(x[0, 0]), "float(x[0, 0])", "fl.step_closure"),
    "tolist": (lambda x, i: x.tolist(), "x.tolist()", "fl.step_closure"),
    "to cpu, numpy": (lambda x, i: x.to("cpu").numpy(), 'x.to("cpu").numpy()', "fl.step_closure"),
    "format": (lambda x, i: f"{x.sum():.3f}", FORMATTED, "fl.step_closure"),
    "if": (lambda x, i: branch(x), "x[0, 0] > 0", "torch.cond"),
    "while": (lambda x, i: loop(x), "x.sum() > 0", "torch.cond"),
    "bool": (lambda x, i: bool(x.any()), "bool(x.any())", "torch.cond"),
    "a mask": (lambda x, i: (x > 0).flatten().any().item(), "(x > 0).flatten().any().item()", "inside the step"),
    "assert": (lambda x, i: asserted(x), "assert torch.isfinite(x).all()", "assert outside"),
    "slice": (lambda x, i: x[: i[0]], "x[: i[0]]", "torch.arange(n) < k"),
    "size": (lambda x, i: torch.zeros(i[0]), "torch.zeros(i[0])", "must be static"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_error_cites_the_expression_and_says_what_to_write_instead(kind, backend):
    dynamic, cited, advice = REFUSED[kind]

    @fl.trace(reads="refuse")
    def step(x, i):
        dynamic(x, i)
        return x

    with pytest.raises(fl.errors.ValueReadError) as caught:
        step(X, IDS)
    message = str(caught.value)
    assert message.startswith(f"{__file__}:") and f"`{cited}`" in message and advice in message


def test_code_without_a_file_is_named_by_its_operation(backend):
    scope = {}
    exec(compile("def dynamic(x):\n    return x.nonzero()", "/nowhere/made.py", "exec"), scope)
    with pytest.raises(
        fl.errors.ValueReadError, match=r"^/nowhere/made.py:2: .*this line.*aten.nonzero.*nonzero_static"
    ):
        fl.trace(scope["dynamic"], reads="refuse")(X)


def sorted_count(i):
    s = i.sort().values
    first = s[1:] != s[:-1]
    return first.sum() + 1


def selected(x, mask):
    """As transformers' LED checks whether some token attends globally."""
    global_too = (F.pad(mask, (0, 1), value=0) > 0).flatten().any().item()
    return x * 2 if global_too else x


# The static alternatives that the errors suggest, each with the code that it replaces.
STATIC = {
    "mask, mean": (lambda x, i: x[x > 0].mean(), lambda x, i: torch.where(x > 0, x, 0).sum() / (x > 0).sum()),
    "unique": (lambda x, i: torch.tensor(len(i.unique())), lambda x, i: sorted_count(i)),
    "unique, known": (
        lambda x, i: torch.isin(torch.arange(5), i.unique()),
        lambda x, i: F.one_hot(i, 5).any(0),
    ),
    "bincount": (
        lambda x, i: torch.bincount(i, minlength=5),
        lambda x, i: torch.zeros(5, dtype=torch.long).scatter_add(0, i, torch.ones_like(i)),
    ),
    "bincount, one_hot": (lambda x, i: torch.bincount(i, minlength=5), lambda x, i: F.one_hot(i, 5).sum(0)),
    "first k": (
        lambda x, i: torch.cat([x.flatten()[: i[0]], torch.zeros(6 - int(i[0]))]),
        lambda x, i: torch.where(torch.arange(6) < i[0], x.flatten(), 0),
    ),
    "equal": (lambda x, i: torch.tensor(torch.equal(x, x.abs())), lambda x, i: (x == x.abs()).all()),
    "a mask of ones, made in the step": (
        lambda x, i: selected(x, torch.ones_like(i)),
        lambda x, i: selected(x, torch.ones_like(i)),
    ),
}


@pytest.mark.parametrize("kind", STATIC)
def test_the_suggested_code_gives_the_same_result(kind, backend):
    dynamic, static = STATIC[kind]
    actual = fl.trace(static)(X, IDS)
    # a sum of two or three numbers in any order, and a division
    torch.testing.assert_close(actual.clone(), dynamic(X, IDS), rtol=1e-6, atol=0)


@pytest.mark.parametrize("repeats", ([2, 0, 3], [0, 0, 5], [5, 0, 0], [1, 3, 1]))
@pytest.mark.parametrize("dim", (None, 1))
def test_repeat_interleave_is_static_with_output_size(repeats, dim, backend):
    n = sum(repeats) * (1 if dim else 2)
    many = torch.tensor(repeats if dim else repeats * 2)

    def step(x, many):
        x = x.clone().requires_grad_()
        out = x.repeat_interleave(many, dim, output_size=n)
        (out * torch.arange(1.0, n + 1)).sum().backward()
        return out.detach(), x.grad

    for actual, expected in zip(fl.trace(step)(X, many), step(X, many), strict=True):
        assert torch.equal(actual, expected)  # the gradients are sums of small integers


def test_a_wrong_output_size_is_visible(backend):
    """Eager raises; a compiled step cannot."""
    for size in (4, 6):
        actual = fl.trace(lambda x, n, size=size: x.repeat_interleave(n, output_size=size))(
            X[0], torch.tensor([2, 0, 3])
        )
        assert actual.shape == (size,) and actual.isnan().all()


def in_place(x):
    x.masked_fill_(x > 0, 2.0)


def scalar(x):
    x[x > 0] = 7


def of_tensor(x):
    x[x > 0] = x.detach().sum()


def row(x):
    x[torch.tensor([False, True])] = torch.tensor([5.0, 6.0, 7.0])


def rows(x):
    x[x.sum(1) > 0] = 2


def columns(x):
    x[:, x[0] > 0] = 3


def columns_of_their_own(x):
    x[:, x[0] > 0] = torch.tensor([[3.0], [4.0]])


def columns_in_turn(x):
    x[:, x[0] > 0] = torch.tensor([[3.0, 4.0], [5.0, 6.0]])


def element(x):
    x[x[:, 0] > 0, 1] = 4


def masked_add(x):
    x += torch.where(x > 0, 1, 0)


def accumulated(x):
    x.index_put_((x > 0,), torch.tensor(2.0), accumulate=True)


WRITES = (in_place, scalar, of_tensor, row, rows, columns, columns_of_their_own, columns_in_turn, element, masked_add)


@pytest.mark.parametrize("write", (*WRITES, accumulated))
def test_a_masked_write_matches_eager_with_its_gradient(write, backend):
    def step(x):
        x = x.clone().requires_grad_()
        y = x * 2
        write(y)
        (y * y).sum().backward()
        return y.detach(), x.grad

    for actual, expected in zip(fl.trace(step)(X), step(X), strict=True):
        assert torch.equal(actual, expected)


def test_the_gradient_of_index_put_by_mask_needs_where(backend):
    def written(x, v):
        return x.index_put((x > 0,), v)

    def step(x, how):
        v = torch.ones((), requires_grad=True)
        (how(x, v) * x).sum().backward()
        return v.grad

    with pytest.raises(fl.errors.ValueReadError, match=r"\.backward\(\)`.*write x\[mask\] = v or x"):
        fl.trace(lambda x: step(x, written), reads="refuse")(X)
    actual = fl.trace(lambda x: step(x, lambda x, v: torch.where(x > 0, v, x)))(X)
    assert torch.equal(actual, step(X, written))
