"""List and in-place operations on mixed deferred and real tensors, as in eager PyTorch."""

import numpy as np
import pytest
import torch

import firstloss as fl
from firstloss.capture import shapes


def _params(a, b):
    grads, states = [torch.ones(3), torch.ones(3)], [torch.zeros(3), torch.zeros(3)]
    return [a, b], grads, states, [torch.zeros(3), torch.zeros(3)], [], [torch.ones(()), torch.ones(())]


_ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False, "maximize": False}

EDITS = {
    "mul": lambda a, b: torch._foreach_mul_([a, b], 2.0),
    "mul the other way": lambda a, b: torch._foreach_mul_([b, a], 2.0),
    "add list": lambda a, b: torch._foreach_add_([a, b], [b.clone(), a.clone()], alpha=3),
    "add each other": lambda a, b: torch._foreach_add_([a, b], [b, a]),
    "views": lambda a, b: torch._foreach_mul_([a[:2], b[1:], a[1:]], 2.0),
    "zero": lambda a, b: torch._foreach_zero_([a, b]),
    "copy": lambda a, b: torch._foreach_copy_([a, b], [torch.arange(3.0), torch.randn(3)]),
    "lerp": lambda a, b: torch._foreach_lerp_([a, b], [torch.ones(3), torch.zeros(3)], 0.25),
    "addcdiv": lambda a, b: torch._foreach_addcdiv_([b, a], [a, a], [torch.full((3,), 2.0)] * 2, 0.5),
    "adamw": lambda a, b: torch._fused_adamw_(*_params(a, b), **_ADAM),
    "sgd": lambda a, b: torch._fused_sgd_(
        [b, a], [torch.ones(3)] * 2, [], weight_decay=0.1, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=True,
    ),
    "unscale": lambda a, b: torch._amp_foreach_non_finite_check_and_unscale_([a, b], torch.zeros(1), torch.ones(())),
    "two outs": lambda a, b: torch.aminmax(torch.randn(3, 4), dim=1, out=(a, b)),
    "rrelu": lambda a, b: a.copy_(torch.rrelu(torch.rrelu_(torch.randn(3), training=True), training=True)),
    "binomial": lambda a, b: a.copy_(torch.binomial(torch.full((3,), 9.0), torch.rand(3))),
    "dirichlet": lambda a, b: a.copy_(torch._sample_dirichlet(torch.rand(3))),
    "out that grows": lambda a, b: a.copy_(torch.nonzero(b, out=torch.zeros(0, dtype=torch.int64)).squeeze(1)),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("outside", [False, True], ids=["captured", "afterwards"])
def test_lists_of_deferred_and_real_tensors_match_eager(edit, outside):
    def build():
        return [torch.randn(3), torch.randn(3)] if outside else changed([torch.randn(3), torch.randn(3)])

    def changed(actual):
        b = torch.from_numpy(np.arange(1, 4, dtype=np.float32))  # real, even in a capture
        edit(actual[0], b)
        return [*actual, b]

    results, counts = [], []
    for how in (lambda fn: fn(), fl.deferred_init):
        torch.manual_seed(3)
        actual = how(build)
        actual = changed(actual) if outside else actual
        counts.append([t._version for t in actual])
        results.append(([fl.materialize_tensor(t).clone() for t in actual], torch.get_rng_state()))
    assert torch.equal(results[0][1], results[1][1])
    if not outside:  # if the edit itself makes the tensor real, its version count starts there
        assert counts[0] == counts[1], "autograd knows by them what was edited since"
    for expected, result in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(expected, result)


def test_shapes_are_asked_for_once_for_weights_that_are_alike(monkeypatch):
    evaluations = []
    on_meta = shapes._run_meta_kernel
    monkeypatch.setattr(shapes, "_run_meta_kernel", lambda call: evaluations.append(call) or on_meta(call))

    def powers():
        weights = [torch.ones(3, 17) for _ in range(5)] + [torch.ones(17)]
        return torch._foreach_pow(0.37, weights), torch._foreach_pow(weights, 0.37)

    behind, before = fl.deferred_init(powers)
    calls = [call for call in evaluations if "_foreach_pow" in str(call.op)]
    assert [sorted(tuple(t.shape) for t in call.deferred) for call in calls] == [[(3, 17), (17,)]] * 2
    assert [tuple(t.shape) for t in (*behind, *before)] == [(3, 17)] * 5 + [(17,)] + [(3, 17)] * 5 + [(17,)]
