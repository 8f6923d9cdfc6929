"""In a traced step, values that depend on no input are known: they can be read, and used as sizes."""

import pytest
import torch

import firstloss as fl

X = torch.tensor([[3.0, -1.0, 2.0], [-1.0, 0.5, -4.0]])


def early(x):
    return x * 2 if torch.arange(3).sum() == 3 else x


def windows(x):
    lengths = torch.tensor([1, 2])
    return torch.cat([part.sum(1) for part in x.split(lengths.tolist(), dim=1)])


def edited(x):
    order = torch.zeros(3, dtype=torch.long)
    order[1:] += torch.tensor([2, 1])
    return x[:, order.tolist()]


STATIC = {
    "item": lambda x: x * torch.tensor(3).item(),
    "a branch": early,
    "tolist": windows,
    "edited in place": edited,
    "a mask": lambda x: x[:, torch.tensor([True, False, True])],
    "a mask of two dimensions": lambda x: x[torch.ones(2, 3).tril() > 0],
    "masked_select": lambda x: x.masked_select(torch.tensor([True, False, True])),
    "repeats": lambda x: x.repeat_interleave(torch.tensor([2, 0, 1]), dim=1),
    "nonzero": lambda x: x[:, torch.eye(3).nonzero()[:, 0]],
    "unique": lambda x: x[:, torch.tensor([2, 0, 2]).unique()],
    "tensor_split": lambda x: torch.cat([p.sum(1) for p in x.tensor_split(torch.tensor([1, 2]), dim=1)]),
    "narrow": lambda x: x.narrow(1, torch.tensor(1), 2),
    "equal": lambda x: x if torch.equal(torch.ones(2), torch.full((2,), 1.0)) else -x,
    "numpy": lambda x: x[:, torch.arange(2).numpy()],
}


@pytest.mark.parametrize("name", STATIC)
def test_values_that_depend_on_no_input_are_known(name, backend):
    function = STATIC[name]

    @fl.trace
    def step(x):
        x = x.clone().requires_grad_()
        y = function(x)
        (y * y).sum().backward()
        return y, x.grad

    x = X.clone().requires_grad_()
    y = function(x)
    (y * y).sum().backward()
    for actual, expected in zip(step(X), (y, x.grad), strict=True):
        assert torch.equal(actual, expected)


def test_state_made_from_constants_is_not_constant(backend):
    with backend.device:
        model = torch.nn.BatchNorm1d(3)
    fl.compile(model, backend)

    @fl.trace(reads="refuse")
    def step(x):
        return x * model.num_batches_tracked.item()

    with pytest.raises(fl.errors.ValueReadError):
        step(X)


@pytest.mark.parametrize("shape", [(), (3,), (1, 3)])
def test_a_write_through_a_mask_has_a_gradient(shape, backend):
    def function(x, v):
        x = x * 2
        x[torch.tensor([False, True]) if shape else x > 0] = v * 3
        return x

    check_write(function, torch.full(shape, 2.0), backend)


def test_a_write_of_one_value_per_index_has_a_gradient(backend):
    def function(x, v):
        x = x * 2
        x[x > 0] = v * 3
        return x

    check_write(function, torch.tensor([1.0, 2.0, 3.0]), backend)


def check_write(function, v, backend):
    def gradients(x, v):
        x, v = x.clone().requires_grad_(), v.clone().requires_grad_()
        y = function(x, v)
        (y * y).sum().backward()
        return y, x.grad, v.grad

    for actual, expected in zip(fl.trace(gradients)(X, v), gradients(X, v), strict=True):
        assert torch.equal(actual, expected)


MADE = {
    "numbers": lambda x: torch.tensor([x[0, 0], x[1, 2]]),
    "lists": lambda x: torch.tensor([[x[0, 0], 1], [2.5, x[1, 1]]]),
    "whole numbers": lambda x: torch.tensor([x.argmax(), 7]),
    "a dtype": lambda x: torch.tensor([x.argmax(), True], dtype=torch.float64),
    "as_tensor": lambda x: torch.as_tensor((x.sum().bfloat16(), x.argmin())),
    "a tensor": lambda x: torch.tensor(x[0]),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", MADE)
def test_a_tensor_is_made_of_traced_numbers(name, backend):
    actual, expected = fl.trace(MADE[name])(X), MADE[name](X)
    assert torch.equal(actual, expected) and actual.dtype == expected.dtype


@pytest.mark.parametrize("joined", [False, True])
def test_ctc_loss_takes_traced_lengths(joined, backend):
    torch.manual_seed(0)
    x = torch.randn(6, 2, 4).requires_grad_()
    targets, lengths, long = torch.tensor([[1, 2, 3], [2, 2, 0]]), torch.tensor([3, 2]), torch.tensor([6, 5])
    targets = torch.tensor([1, 2, 3, 2, 2]) if joined else targets

    def gradient(x, targets, long, lengths):
        x = x.detach().requires_grad_()
        loss = torch.nn.functional.ctc_loss(x.log_softmax(-1), targets, long, lengths)
        loss.backward()
        return loss, x.grad

    for actual, expected in zip(
        fl.trace(gradient)(x, targets, long, lengths), gradient(x, targets, long, lengths), strict=True
    ):
        # sums of about twenty probabilities, in another order
        torch.testing.assert_close(actual.clone(), expected, rtol=1e-5, atol=1e-6)


def test_a_failed_assertion_is_an_error_at_its_line(backend):
    @fl.trace
    def step(x):
        torch._assert_async((x < 5).all(), "x has grown")
        return x + 1

    assert torch.equal(step(X), X + 1)
    with pytest.raises(fl.errors.StepAssertionError, match=rf"{__file__}:\d+: x has grown"):
        step(X + 3)


def test_an_assertion_runs_after_every_step_of_a_loop(backend):
    @fl.trace
    def step(x):
        torch._assert_async(x.sum() != 2)
        return x

    loader = fl.utils.data.DataLoader(lambda: torch.arange(6.0).unsqueeze(1))
    seen = []
    with pytest.raises(fl.errors.StepAssertionError):
        for batch in fl.utils.data.DataExecutor(loader, num_steps=6, activation_steps=5):
            seen.append(step(batch))
    assert 2 <= len(seen) <= 5


def test_validation_branches_are_checked_after_the_step(backend):
    @fl.trace
    def step(x, var):
        return torch.nn.functional.gaussian_nll_loss(x, torch.zeros_like(x), var)

    var = torch.full_like(X, 0.25)
    torch.testing.assert_close(  # a few sums
        step(X, var).clone(), torch.nn.functional.gaussian_nll_loss(X, torch.zeros_like(X), var), rtol=1e-6, atol=0
    )
    with pytest.raises(fl.errors.StepAssertionError, match=rf"{__file__}:\d+: gaussian_nll_loss: var has negative"):
        step(X, -var)


def test_a_distribution_is_validated_after_the_step(backend, monkeypatch):
    # PyTorch's default; its compiler changes it for the whole process once it has compiled anything.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    @fl.trace
    def step(x, scale):
        return torch.distributions.Normal(0.0, scale).log_prob(x).sum()

    expected = torch.distributions.Normal(0.0, torch.ones(3)).log_prob(X).sum()
    torch.testing.assert_close(step(X, torch.ones(3)).clone(), expected, rtol=1e-6, atol=0)  # a few sums
    with pytest.raises(fl.errors.StepAssertionError, match="a parameter of a distribution"):
        step(X, -torch.ones(3))


def test_a_function_imported_before_the_trace_raises_our_error(backend):
    split = torch.tensor_split

    @fl.trace(reads="refuse")
    def step(x, places):
        return split(x, places, dim=1)[0]

    with pytest.raises(fl.errors.ValueReadError, match=rf"{__file__}:\d+: .* reads the memory of a tensor"):
        step(X, torch.tensor([1, 2]))


def test_matrix_rank_is_written_to_out(backend):
    @fl.trace
    def step(x):
        rank = torch.zeros((), dtype=torch.int64)
        torch.linalg.matrix_rank(x, out=rank)
        return rank

    assert step(X) == 2
