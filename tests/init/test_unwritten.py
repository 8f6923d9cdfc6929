"""`firstloss.check_init`: exactly the elements that nothing has written are found, whatever has been done to others."""

import inspect
import os
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import firstloss as fl
from firstloss import errors
from tests.init.distributed import on_ranks


@pytest.fixture(autouse=True)
def nan_in_memory():
    """Memory is handed out full of NaN, which tells what has been written without the sanitizer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Weight(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape, device="meta"))


# Operations on a weight of 6 x 4; each is given its `data` and the module.
OPERATIONS = {
    "fill": lambda w: w.fill_(1.0),
    "normal": lambda w: w.normal_(),
    "rows": lambda w: w[1:3].zero_(),
    "columns": lambda w: w[:, ::2].copy_(torch.ones(6, 2)),
    "an element": lambda w: w[2, 3].fill_(5),
    "transposed": lambda w: w.t()[1].uniform_(),
    "indices": lambda w: w.__setitem__(torch.tensor([0, 5]), torch.ones(2, 4)),
    "accumulated indices": lambda w: w.index_put_((torch.tensor([1]),), torch.ones(1, 4), accumulate=True),
    "index_fill": lambda w: w.index_fill_(1, torch.tensor([3]), 0.5),
    "index_copy": lambda w: w.index_copy_(0, torch.tensor([4]), torch.ones(1, 4)),
    "masked": lambda w: w.masked_fill_(torch.eye(6, 4, dtype=torch.bool), 1.0),
    "scatter": lambda w: w.scatter_(0, torch.tensor([[0, 1, 2, 3]]), 1.0),
    "diagonal": lambda w: w.fill_diagonal_(1.0),
    "scaled": lambda w: w.mul_(2),
    "added": lambda w: w.add_(torch.ones(6, 4)),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "foreach zero": lambda w: torch._foreach_zero_([w[:1], w[3:4]]),
    "out": lambda w: torch.add(torch.ones(2, 4), 1, out=w[:2]),
    "from a copy": lambda w: w.copy_(w.clone()),
    "from other rows": lambda w: w[:2].copy_(w[2:4].clone()),
    "other memory": lambda w: w[:3].copy_(torch.empty(3, 4)),
    "rounded": lambda w: w.copy_(w.to(torch.bfloat16)),
    "itself": lambda w: w.copy_(w),
    "a row for all": lambda w: w.copy_(w[2].clone()),
    "doubled": lambda w: w.copy_(w * 2),
    "first rows from others": lambda w: w[:2].copy_((w[2:4] + w[4:]).abs()),
    "a row from all": lambda w: w[:1].copy_(w.sum(0, keepdim=True).sum(1, keepdim=True)),
    "normalized": lambda w: w.div_(w.norm() + 1),
    "normalized rows": lambda w: w[3].div_(w[3].abs().max() + 1),
    "an index of itself": lambda w: w.index_put_((torch.tensor([1]),), w.sum()),
    "lists": lambda w: torch._foreach_copy_([w[:2], w[2:3]], [torch.ones(2, 4), w[3:4].clone()]),
    "stacked": lambda w: w.copy_(torch.stack([torch.ones(6, 2), torch.zeros(6, 2)], 2).reshape(6, 4)),
    "orthogonal": lambda w: nn.init.orthogonal_(w),
    "truncated": lambda w: nn.init.trunc_normal_(w),
    "nothing": lambda w: torch.zeros_like(w),
}


@given(st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=6), st.sampled_from([None, "double", "copy", "t"]))
@settings(deadline=None)
def test_what_is_unwritten_is_what_holds_nan(names, then):
    with fl.check_init("report") as check, torch.no_grad():
        model = Weight(6, 4).to_empty(device="cpu")
        for name in names:
            OPERATIONS[name](model.weight.data)
        if then == "double":
            model.double()
        elif then == "copy":
            model.weight = nn.Parameter(model.weight.detach().clone())
        elif then == "t":
            model.weight.data = model.weight.data.t().contiguous()
    missing = int(model.weight.isnan().sum())
    found = [weight for weight in check.unwritten if weight.shape == tuple(model.weight.shape)]
    assert [weight.elements for weight in found] == ([missing] if missing else [])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.unused = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return self.norm(self.layer(x)) * self.angles


def on_meta():
    with torch.device("meta"):
        model = Net()
    return model.to_empty(device="cpu")


def test_each_is_named_with_its_lines_and_its_class():
    with fl.check_init("report") as check:
        model = on_meta()
        model.layer.reset_parameters()
        model(torch.ones(2, 4)).sum().backward()
        torch.optim.AdamW(model.parameters()).step()
    found = {weight.name: weight for weight in check.unwritten}
    assert sorted(found) == ["angles", "norm.bias", "norm.weight", "unused"]
    file = __file__
    assert found["angles"].kind == "non-persistent buffer" and found["norm.bias"].kind == "parameter"
    assert str(found["angles"].handed_out) == f"{file}:{line_of(on_meta, 'to_empty')}"
    assert str(found["angles"].read) == f"{file}:{line_of(Net, 'self.angles', last=True)}"
    assert found["unused"].read is None and found["unused"].owner == f"Net at {file}:{line_of(Net, 'class Net')}"
    assert str(found["norm.weight"].read) == f"{file}:{line_of(Net, 'self.norm(')}"
    assert found["norm.weight"].owner.startswith("LayerNorm at ")


def line_of(thing, text, last=False):
    lines, begin = inspect.getsourcelines(thing)
    numbers = [begin + i for i, line in enumerate(lines) if text in line]
    return numbers[-1] if last else numbers[0]


def test_it_raises_warns_or_reports():
    with pytest.raises(errors.UnwrittenWeightsError, match=r"1 parameters and buffers(.|\n)*weight: \(parameter, 2x3"):
        with fl.check_init():
            model = Weight(2, 3).to_empty(device="cpu")
    with pytest.warns(errors.UnwrittenWeightsWarning, match="weight") as caught, fl.check_init("warn"):
        model = Weight(2, 3).to_empty(device="cpu")
    assert caught[0].filename == __file__
    with pytest.raises(ZeroDivisionError), fl.check_init() as check:  # the script's own error is not hidden
        model = Weight(2, 3).to_empty(device="cpu")
        1 / 0  # noqa: B018
    assert [weight.name for weight in check.unwritten] == ["weight"]
    with pytest.raises(errors.CaptureError, match="report"):
        fl.check_init("ignore")
    with pytest.raises(errors.CaptureError, match="deferred"), fl.deferred(), fl.check_init():
        pass
    assert model.weight.shape == (2, 3)


def test_nothing_is_found_in_eager_construction_and_training():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fl.check_init():
            model = nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LSTM(4 * 36, 5, batch_first=True)
            )
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(torch.rand(2, 3, 8, 8))[0].sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.inference_mode():
                model.eval()(torch.rand(2, 3, 8, 8))
            copied = torch.nn.Linear(3, 3)
            copied.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(3)})


def test_a_checkpoint_that_lacks_a_tensor():
    """As `load_state_dict(strict=False)` of one without a buffer, after `to_empty`: a loss that is wrong in silence."""
    with fl.check_init("report") as check:
        model = on_meta()
        state = {name: torch.ones(tensor.shape) for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, strict=False)
    assert [weight.name for weight in check.unwritten] == ["angles"]


class Bare(nn.Module):
    def __init__(self):
        """Without that of the base class."""


def test_a_module_that_was_never_constructed_is_left_alone():
    bare = Bare(), nn.Linear.__new__(nn.Linear)
    with fl.check_init("report") as check:
        model = Weight(2, 3).to_empty(device="cpu")
    assert len(check.unwritten) == 1 and bare and model.weight.shape == (2, 3)


def test_memory_that_is_gone_is_forgotten():
    with fl.check_init() as check:
        for _ in range(50):
            torch.empty(1000)
        torch.empty(10).sum()  # read, and no weight
    assert check.unwritten == []


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_sharded_models(one_rank):
    """FSDP2's idiom: shard on meta, `to_empty`, initialize; weights are DTensors."""
    from torch.distributed.fsdp import fully_shard

    with fl.check_init("report") as check:
        with torch.device("meta"):
            model = Net()
        fully_shard(model)
        model.to_empty(device="cpu")
        model.layer.reset_parameters()
        model(torch.ones(2, 4)).sum().backward()
    assert sorted(weight.name for weight in check.unwritten) == ["angles", "norm.bias", "norm.weight", "unused"]
    assert os.path.basename(next(w for w in check.unwritten if w.name == "angles").read.file) == os.path.basename(
        __file__
    )


@pytest.mark.timeout(0)  # `on_ranks` has a time limit of its own
def test_weights_that_each_rank_draws_for_itself():
    on_ranks(2, "tests.init.rank_draws_ranks:find", "tests.init.rank_draws_ranks:warn")
