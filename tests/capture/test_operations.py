"""Every operation with PyTorch samples, in a constructor: bits, strides and random stream match eager PyTorch.

One sample of each, in float32 or, for some, complex64.
"""

import itertools
import random
import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import firstloss as fl
from tests.op_db import op_db

# They return uninitialized memory, or are not deterministic in eager PyTorch (LAPACK's gelsy).
_UNDEFINED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "linalg.lstsq",
}
# `tensor_split` by a tensor of indices, which C++ reads without the dispatcher: an error of torch's own.
_REFUSED = {"tensor_split"}
_GROUPS = 24


def name_of(op):
    return f"{op.name}.{op.variant_test_name}".strip(".")


def same(a, b):
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    if a.layout != torch.strided or a.is_quantized:
        return True
    x, y = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (a, b))
    x, y = (torch.empty(t.shape, dtype=t.dtype).copy_(t).view(torch.uint8) for t in (x, y))
    return torch.equal(x, y) and (a.stride() == b.stride() or a.numel() < 2)


def of_our_own(tensor):
    """A copy of `tensor` in newly allocated memory."""
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.layout != torch.strided
        or tensor.is_nested
        or tensor.is_quantized
    ):
        return tensor
    return torch.zeros_like(tensor).copy_(tensor.detach())


def run(op, sample, seed):
    torch.manual_seed(seed)
    output = op(of_our_own(sample.input), *tree_map(of_our_own, sample.args), **tree_map(of_our_own, sample.kwargs))
    return [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]


def check(op, sample, seed):
    try:
        expected = run(op, sample, seed)
    except Exception:
        return None  # a sample for another device
    state = torch.get_rng_state()
    with fl.deferred():
        actual = run(op, sample, seed)
    if not torch.equal(torch.get_rng_state(), state):
        return "the generator does not stand where eager leaves it"
    actual = [fl.materialize_tensor(t) for t in actual]
    if not torch.equal(torch.get_rng_state(), state):
        return "materializing moved the generator"
    if len(actual) != len(expected) or not all(map(same, expected, actual)):
        strides = (
            [t.stride() for t in expected if t.layout == torch.strided],
            [t.stride() for t in actual if t.layout == torch.strided],
        )
        return f"differs:\n{expected}\n{actual}\n{strides}"
    return None


@pytest.mark.parametrize("group", range(_GROUPS))
def test_operations_in_a_constructor_match_eager(group):
    chance = random.Random(group)
    wrong = []
    for op in op_db[group::_GROUPS]:
        if op.name in _UNDEFINED or op.name in _REFUSED or op.name.startswith("sparse."):
            continue
        known = sorted(op.supported_dtypes("cpu"), key=str)
        if not known:
            continue
        dtype = torch.complex64 if torch.complex64 in known and chance.random() < 0.3 else torch.float32
        dtype = dtype if dtype in known else known[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = list(itertools.islice(op.sample_inputs("cpu", dtype), 1 + chance.randrange(5)))[-1:]
            for sample in samples:  # the last draw
                try:
                    problem = check(op, sample, seed=group)
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                if problem:
                    wrong.append(f"{name_of(op)} {dtype} {sample.summary()}: {problem}")
    assert not wrong, "\n".join(wrong)
