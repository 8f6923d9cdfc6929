"""The random keys of steps are state of the backend."""

import pytest
import torch

import firstloss as fl


def dropout_step(backend):
    compiled = fl.compile(torch.nn.Dropout(0.5), backend)
    return fl.trace(lambda x: compiled(x))


def test_a_backend_goes_on_with_its_random_numbers(backend, tmp_path):
    torch.manual_seed(3)
    step = dropout_step(backend)
    x = torch.ones(100)
    step(x)
    saved = backend.state_dict()
    expected = [step(x).clone() for _ in range(2)]
    assert not torch.equal(*expected)
    torch.manual_seed(4)  # another process would have another seed, or none
    other = fl.backend("XLA", artifact_dir=tmp_path)
    other.load_state_dict(saved)
    step = dropout_step(other)
    assert all(torch.equal(step(x), e) for e in expected)


def test_a_new_seed_begins_anew(backend):
    step = dropout_step(backend)
    x = torch.ones(100)
    torch.manual_seed(3)
    first = step(x).clone()
    assert not torch.equal(step(x), first)
    torch.manual_seed(5)
    step(x)
    torch.manual_seed(3)
    assert torch.equal(step(x), first)


def test_a_step_that_draws_nothing_takes_no_number(backend):
    fl.trace(lambda x: x + 1)(torch.ones(2))
    assert backend.state_dict()["random"]["steps"] == 0


@pytest.mark.parametrize("state", [{}, {"random": {}}, {"random": {"seed": 1, "steps": "2"}}])
def test_a_state_that_is_none_is_refused(backend, state):
    with pytest.raises(fl.errors.CheckpointError, match="seed"):
        backend.load_state_dict(state)


def test_the_same_seed_again_begins_anew(backend):
    step = dropout_step(backend)
    x = torch.ones(100)
    torch.manual_seed(3)
    first = step(x).clone()
    torch.manual_seed(3)
    assert torch.equal(step(x), first)
