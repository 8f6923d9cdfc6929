"""Views that a constructor made of a weight before it edited the weight: what autograd makes of them afterwards."""

import itertools

import pytest
import torch
from torch import nn

import firstloss as fl


def without_grad(view):
    def run(weight):
        with torch.no_grad():
            return view(weight)

    return run


VIEWS = {
    "diagonal": torch.Tensor.diagonal,
    "select": lambda w: w[0],
    "chain": lambda w: w[0].view(-1)[1:],
    "permute": lambda w: w.permute(2, 1, 0),
    "expand": lambda w: w.unsqueeze(0).expand(2, -1, -1, -1),
    "view_as": lambda w: w.view_as(w),
    "unbind": lambda w: w.unbind(0)[1],
    "split": lambda w: w.split(2)[1],
    "select without grad": without_grad(lambda w: w[0]),
    "of detached": lambda w: w.detach()[0],
    "of data": lambda w: w.data[0],
}
EDITS = {
    "nothing": lambda w, view: None,
    "setitem": lambda w, view: w.__setitem__(1, 0.25),
    "init": lambda w, view: nn.init.ones_(w),
    "copy": lambda w, view: w.copy_(torch.ones_like(w)),
    "foreach": lambda w, view: torch._foreach_mul_([w], 2.0),
    "of the view": lambda w, view: view.mul_(2),
    "of data": lambda w, view: w.data.zero_(),
    "of a view of data": lambda w, view: w.data[0].mul_(3),
    "of detached": lambda w, view: w.detach().zero_(),
}


def constructor(view, edit, order, requires_grad):
    def build():
        torch.manual_seed(0)
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(4, 1, 3).normal_(), requires_grad)
        model.views, latest = [], model.weight
        for what in order:
            if what == "view":
                latest = view(model.weight)
                model.views.append(latest)
            else:
                with torch.no_grad():
                    edit(model.weight, latest)
        return model

    return build


def gradients(model):
    """Of each view: whether it requires grad, and as lists the gradients of a sum of it; or the type of error."""
    for view in model.views:
        model.weight.grad = None
        try:
            yield view.requires_grad, view.is_leaf
            (view * view).sum().backward()
            yield [None if t.grad is None else t.grad.tolist() for t in (model.weight, view) if t.is_leaf]
        except RuntimeError as error:
            yield type(error)  # which of its reasons PyTorch tells depends on how the view was made


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_gradients_reach_the_weight_as_in_eager_pytorch(view, requires_grad):
    orders = [("view", "edit"), ("edit", "view"), ("edit", "view", "edit"), ("view", "edit", "view")]
    compared = 0
    for edit, order, is_made_first in itertools.product(EDITS, orders, (False, True)):
        build = constructor(VIEWS[view], EDITS[edit], order, requires_grad)
        try:
            eager = build()
        except RuntimeError:  # an edit of a view that PyTorch does not allow
            continue
        model = fl.deferred_init(build)
        if is_made_first:
            fl.materialize_module(model)
        for each in (eager, model):
            each.weight.requires_grad_(True)
        for tensor in (model.weight, *model.views):
            fl.materialize_tensor(tensor)
        assert list(gradients(model)) == list(gradients(eager)), (edit, order, is_made_first)
        compared += 1
    assert compared >= 48
