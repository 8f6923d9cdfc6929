"""A compiled model is a proxy of its model: reads, writes and calls apply to the model."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import firstloss as fl


@pytest.fixture
def pair(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    return model, fl.compile(model, backend)


def outputs(compiled, x):
    return fl.trace(lambda x: compiled(x))(x)


SETTINGS = {
    "training": lambda c: setattr(c, "training", False),
    "an attribute": lambda c: setattr(c, "scale", 3.0),
    "an attribute deleted": lambda c: (setattr(c, "scale", 3.0), delattr(c, "scale")),
    "a module": lambda c: setattr(c, "head", nn.Identity()),
    "a module deleted": lambda c: delattr(c, "1"),
    "a parameter": lambda c: setattr(c, "extra", nn.Parameter(torch.ones(2))),
    "forward": lambda c: setattr(c, "forward", lambda x: x),
    "an item": lambda c: c.__setitem__(1, nn.Identity()),
    "append": lambda c: c.append(nn.Identity()),
    "eval": lambda c: c.eval(),
    "frozen": lambda c: c.requires_grad_(False),
    "a hook": lambda c: c.register_forward_hook(lambda module, args, out: out),
    "apply": lambda c: c.apply(lambda module: setattr(module, "seen", True)),
    "state": lambda c: c.load_state_dict({name: torch.zeros_like(t) for name, t in c.state_dict().items()}),
}


def described(model):
    """Everything observable about a model."""
    return (
        repr(model),
        [(module.training, sorted(set(vars(module)) - {"_forward_hooks"})) for module in model.modules()],
        [(name, p.requires_grad, p.detach().tolist()) for name, p in model.named_parameters()],
        len(model._forward_hooks),
        "forward" in vars(model),
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_changes_of_the_proxy_change_the_model(name, pair, backend):
    model, compiled = pair
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    SETTINGS[name](compiled)
    SETTINGS[name](plain)
    assert described(model) == described(plain)


def test_it_is_an_instance_of_the_models_class(pair):
    model, compiled = pair
    assert isinstance(compiled, nn.Sequential) and isinstance(compiled, nn.Module)
    assert len(compiled) == 3 and compiled[0] is model[0] and list(compiled) == list(model) and model[2] in compiled
    assert [*compiled.parameters()] == [*model.parameters()]
    assert compiled.state_dict().keys() == model.state_dict().keys()
    assert compiled.eval() is compiled and compiled.train() is compiled and compiled.apply(id) is compiled
    assert {"append", "weight_dict", "forward"} & set(dir(compiled)) == {"append", "forward"}
    with pytest.raises(AttributeError, match="nothing_there"):
        _ = compiled.nothing_there


def test_a_plain_module_has_no_length_or_items(backend):
    compiled = fl.compile(nn.Linear(2, 2), backend)
    assert compiled
    with pytest.raises(TypeError, match="len"):
        len(compiled)


def test_it_can_be_a_submodule(pair):
    model, compiled = pair
    whole = nn.Sequential(compiled, nn.Linear(2, 1))
    assert [*whole.state_dict()] == ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias", "1.weight", "1.bias"]
    assert whole.eval() is whole and not model.training


def test_the_models_attributes_take_precedence(backend):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.backend = nn.Linear(2, 2), "mine"

        def forward(self, x):
            return self.model(x)

    outer = Outer()
    compiled = fl.compile(outer, backend)
    assert compiled.model is outer.model and compiled.backend == "mine"
    plain = fl.compile(outer.model, backend)
    assert plain.model is outer.model and plain.backend is backend


def test_eval_of_the_proxy_affects_the_next_step(pair):
    _, compiled = pair
    x = torch.ones(64, 4)
    step = fl.trace(lambda x: compiled(x))
    noisy = step(x).clone()
    compiled.training = False
    assert isinstance(compiled.training, bool)
    compiled.train(False)
    assert torch.equal(step(x), step(x)) and not torch.equal(step(x), noisy)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda c: pickle.loads(pickle.dumps(c)),
    "torch.save": lambda c: _saved(c),
}


def _saved(compiled):
    buffer = io.BytesIO()
    torch.save(compiled, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_a_compiled_copy_of_the_model(name, pair):
    model, compiled = pair
    compiled.eval()
    other = COPIES[name](compiled)
    x = torch.ones(5, 4)
    assert other[0].weight is not model[0].weight and type(other).__name__ == "CompiledModel"
    assert torch.equal(outputs(other, x), outputs(compiled, x))
    with torch.no_grad():
        model[0].weight.zero_()
    assert other[0].weight.abs().sum() > 0


def test_a_shallow_copy_shares_weights(pair):
    model, compiled = pair
    assert copy.copy(compiled)[0] is model[0]


def test_compiling_again_is_compiling_the_model(pair, backend):
    model, compiled = pair
    again = fl.compile(compiled, backend)
    assert again.model is model and sum(m is model for m in backend.models) == 1


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        (lambda m: (m, "CSX"), fl.errors.BackendError, r"not its name 'CSX'.*firstloss.backend\('CSX'\)"),
        (lambda m: (m, "XLA"), fl.errors.BackendError, "not its name 'XLA'"),
        (lambda m: (m, 3), fl.errors.BackendError, "object of type int"),
        (lambda m: (nn.Linear,), fl.errors.TraceError, r"the class Linear. Write compile\(Linear"),
        (lambda m: (lambda x: x,), fl.errors.TraceError, "object of type function"),
    ],
)
def test_compile_refuses_invalid_arguments(arguments, error, says, pair):
    with pytest.raises(error, match=says):
        fl.compile(*arguments(pair[0]))
