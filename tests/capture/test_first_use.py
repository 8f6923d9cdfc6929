"""The first use of a deferred module materializes all of it once, with a warning, bit-identical to eager PyTorch."""

import copy
import io
import os
import sys
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import firstloss as fl
from firstloss.capture.tensor import disable_first_use
from firstloss.errors import NotMaterializedWarning
from firstloss.program import source
from tests import forked

TOKENS = torch.arange(6).reshape(3, 2)


class Model(nn.Module):
    """Layers of many kinds: weights held by C++, ties, buffers, plain tensors, copies."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.tied = self.scale
        self.register_buffer("shift", torch.randn(4))
        self.plain = torch.randn(4)
        self.recurrent = nn.LSTM(4, 4, 2, dropout=0.5)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3)
        self.layers = nn.ModuleList([copy.deepcopy(nn.Linear(4, 4)) for _ in range(3)])
        self.norm = nn.BatchNorm1d(4)
        self.turned = self.layers[0].weight.t()

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale + self.shift * self.plain
        x, _ = self.recurrent(x)
        x = self.attention(x, x, x)[0]
        for layer in self.layers:
            x = layer(x)
        x = torch.nn.functional.dropout(x @ self.turned, 0.2, self.training)
        return (self.norm(x.reshape(-1, 4)) * torch.arange(24.0).reshape(6, 4)).pow(2).mean()


def train(model, optimizer=torch.optim.AdamW, **options):
    optimizer = optimizer(model.parameters(), lr=0.1, **options)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(TOKENS)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses, list(model.parameters()), list(model.buffers())


def step_alone(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.step()
    return list(model.parameters())


def written(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def hooked(model):
    seen = []
    model.scale.register_hook(lambda grad: seen.append(grad.clone()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    train(model)
    return seen


@torch.no_grad()
def edited(model):
    for parameter in model.parameters():
        parameter.add_(torch.ones(parameter.shape))
    return list(model.parameters())


def own(module):
    return dict(module.named_parameters())


USES = {
    "sgd": lambda m: train(m, torch.optim.SGD, momentum=0.9),
    "adamw, one by one": lambda m: train(m, foreach=False),
    "adamw, foreach": lambda m: train(m, foreach=True),
    "adamw, fused": lambda m: train(m, fused=True),
    "adagrad": lambda m: train(m, torch.optim.Adagrad),
    "without gradients": lambda m: torch.no_grad()(m)(TOKENS),
    "evaluating": lambda m: m.eval()(TOKENS),
    "autograd.grad": lambda m: torch.autograd.grad(m(TOKENS), list(m.parameters())),
    "an optimizer's step": step_alone,
    "an edit": edited,
    "torch.save": written,
    "safetensors": lambda m: safetensors.torch.save({k: v for k, v in m.state_dict().items() if k != "tied"}),
    "functional_call": lambda m: torch.func.functional_call(m, own(m), (TOKENS,)),
    "hooks": hooked,
    "clipping": lambda m: (m(TOKENS).backward(), torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0))[1],
    "checkpointing": lambda m: torch.utils.checkpoint.checkpoint(m, TOKENS, use_reentrant=False),
    "torch.compile": lambda m: torch.compile(m.eval(), backend="eager")(TOKENS),
    "torch.export": lambda m: torch.export.export(m.eval(), (TOKENS,)).module()(TOKENS),
}


def compare(use, build=Model, warned=1):
    results = []
    for make in (lambda fn: fn(), fl.deferred_init):
        torch.manual_seed(1)
        model = make(build)
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            torch.manual_seed(2)
            results.append(use(model))
    materialized = [w for w in recorded if w.category is NotMaterializedWarning]
    assert len(materialized) == warned, [str(w.message) for w in materialized]
    assert all("firstloss.materialize_module(model)" in str(w.message) for w in materialized)
    for expected, actual in zip(*map(tree_leaves, results), strict=True):
        if isinstance(expected, torch.Tensor):
            assert actual.dtype == expected.dtype and torch.equal(actual, expected)
        else:
            assert actual == expected
    return model


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_first_use_materializes_the_whole_module(use):
    model = compare(use)
    assert not fl.is_deferred(model)
    assert all(type(p) is nn.Parameter for p in model.parameters()) and model.scale is model.tied


class Alone(nn.Module):
    """A loss of weights only: no operation has a real tensor as argument."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))

    def forward(self, tokens):
        return (self.weight * self.scale).pow(2).sum()


class Scaled(Alone):
    def forward(self, tokens):
        return torch.nn.functional.linear(torch.ones(2, 4), self.weight * self.scale).pow(2).sum()


@pytest.mark.parametrize("build", [Alone, Scaled])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_arithmetic_among_weights_is_still_recorded(build, optimizer):
    assert not fl.is_deferred(compare(lambda m: train(m, optimizer), build))


def test_the_warning_names_the_line_the_module_and_what_to_call():
    model = fl.deferred_init(nn.Linear, 3, 4)
    with pytest.warns(NotMaterializedWarning, match=r"test_first_use.py:\d+: .*Linear.*2 weights.*64 bytes"):
        model(torch.ones(2, 3))


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("edited", [True, False], ids=["a script", "libraries alone"])
def test_the_warning_names_a_line_that_can_be_edited(depth, edited, tmp_path, monkeypatch):
    """The warning names the line in the user's own code if there is one, not in the installed trainer."""
    installed = str(tmp_path) if edited else "/"
    monkeypatch.setattr(source, "is_installed_file", lambda file: file.startswith(installed))
    use = fl.deferred_init(nn.Linear, 3, 4)
    for level in range(depth):
        space = {"inner": use}
        code = "def call(x):\n    return inner(x)\n"
        exec(compile(code, str(tmp_path / f"library{level}.py"), "exec"), space)
        use = space["call"]
    with pytest.warns(NotMaterializedWarning) as record:
        use(torch.ones(2, 3))
    (message,) = [str(w.message) for w in record if w.category is NotMaterializedWarning]
    library = f"{tmp_path}/library0.py:2"
    assert message.startswith(f"{__file__}:" if edited or not depth else f"{library}: ")
    assert (f" (in {library})" in message) == (edited and depth > 0)


def test_uses_that_bypass_the_dispatcher_materialize():
    """In C++, autograd has recorded the tensors before it is known that their values are needed."""

    def use(model):
        disable_first_use()
        losses, parameters, buffers = train(model, foreach=True)
        # the first step uses other kernels, since PyTorch's C++ dispatches differently for tensor subclasses
        return buffers

    model = compare(use, lambda: nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 1), Mean()))
    assert not fl.is_deferred(model) and all(type(p) is nn.Parameter for p in model.parameters())


def test_no_gradient_is_lost_when_the_dispatcher_is_bypassed():
    def use(model):
        disable_first_use()
        model(TOKENS).backward()
        model(TOKENS).backward()
        return [p.grad for p in model.parameters()]

    compare(use, lambda: nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 1), Mean()))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


def test_nothing_is_computed_twice(monkeypatch):
    from firstloss.engine import cpu_engine

    computed = []
    real = cpu_engine.materialize_values
    monkeypatch.setattr(
        cpu_engine, "materialize_values", lambda values, **a: computed.extend(values) or real(values, **a)
    )
    model = fl.deferred_init(Model)
    with pytest.warns(NotMaterializedWarning):
        train(model)
    assert len(computed) == len(set(computed)) > 10


def initialise(model):
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    nn.init.orthogonal_(model.layers[1].weight)
    with torch.no_grad():
        model.scale.mul_(0.5).add_(model.shift)
        model.layers[0].bias.copy_(torch.arange(4.0))
    model.layers[2] = copy.deepcopy(model.layers[0])
    model.load_state_dict({"shift": torch.ones(4)}, strict=False)
    return model.to(torch.float64).float()


def test_initialization_does_not_materialize():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = initialise(fl.deferred_init(Model))
    assert fl.is_deferred(model)
    compare(lambda m: fl.materialize_module(initialise(m)).state_dict(), warned=0)


def test_models_are_materialized_one_by_one():
    first, second = fl.deferred_init(lambda: (nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.warns(NotMaterializedWarning):
        first(torch.ones(2))
    assert fl.is_deferred(second) and not fl.is_deferred(first)


def test_a_wrapper_is_materialized_as_a_whole():
    parts = fl.deferred_init(lambda: [nn.Linear(2, 2), nn.Linear(2, 2)])
    whole = nn.Sequential(*parts)
    with pytest.warns(NotMaterializedWarning, match="of a Sequential.* 4 weights"):
        whole(torch.ones(2))
    assert not fl.is_deferred(whole)


# -- the meta device's idiom -------------------------------------------------------------------------------------------

EMPTYINGS = {
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "to_empty of None": lambda m: m.to_empty(device=None),
    "without children": lambda m: [sub.to_empty(device="cpu", recurse=False) for sub in m.modules()],
    "a part": lambda m: m.layers.to_empty(device="cpu"),
    "twice": lambda m: m.to_empty(device="cpu").to_empty(device="cpu"),
    "_apply": lambda m: m._apply(lambda t: torch.empty_like(t, device="cpu")),
    "data": lambda m: [setattr(p, "data", torch.empty_like(p.data)) for p in {*m.parameters(), *m.buffers()}],
    "new parameters": lambda m: [
        sub.register_parameter(name, nn.Parameter(torch.empty_like(p, device="cpu")))
        for sub in m.modules()
        for name, p in list(sub._parameters.items())
        if p is not None
    ],
}


@pytest.mark.parametrize("empty", EMPTYINGS.values(), ids=EMPTYINGS)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_to_empty_keeps_the_recipes(empty, where):
    torch.manual_seed(0)
    expected = Model().state_dict()
    torch.manual_seed(0)
    with fl.deferred():
        model = Model()
        if where == "inside":
            empty(model)
    if where == "outside":
        empty(model)
    assert fl.is_deferred(model)
    fl.materialize_module(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_to_empty_of_a_real_module_is_pytorchs():
    model = nn.Linear(2, 2)
    weight = model.weight
    before = weight.data_ptr()
    model.to_empty(device="cpu")
    assert model.weight is weight and weight.data_ptr() != before
    assert fl.deferred_init(nn.Linear, 2, 2).to_empty(device="meta").weight.is_meta


def test_filling_after_to_empty_drops_the_recipe():
    weight = fl.deferred_init(lambda: torch.empty_like(torch.randn(100)).fill_(2.0))
    assert len(fl.init_program(nn.ParameterList([weight])).recipes["0"].draws) == 0


def test_meta_device_scripts_work_unchanged():
    def script(construct):
        torch.manual_seed(0)
        with construct():
            model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model.to_empty(device="cpu")
        torch.manual_seed(1)
        for layer in model:
            layer.reset_parameters()
        return model(torch.ones(3, 4)), model.state_dict()

    with pytest.warns(NotMaterializedWarning):
        result = tree_leaves(script(fl.deferred))
    expected = tree_leaves(script(lambda: torch.device("meta")))
    assert len(result) == len(expected) > 0 and all(map(torch.equal, result, expected))


@pytest.mark.parametrize("enter", [fl.deferred_init, lambda fn: fl.deferred().__enter__()])
def test_meta_as_the_default_device_is_an_error(enter):
    with pytest.raises(fl.errors.CaptureError, match=r"test_first_use.py:\d+: the default device is meta"):
        with torch.device("meta"):
            enter(lambda: nn.Linear(2, 2))


def test_tensors_on_the_meta_device_are_named():
    with pytest.raises(fl.errors.MaterializeError, match=r"test_first_use.py:\d+: of this Linear, weight, bias are on"):
        fl.materialize_module(nn.Linear(2, 2, device="meta"))
    model = fl.deferred_init(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    with pytest.warns(fl.errors.MetaTensorsWarning, match=r"1\.weight, 1\.bias are on the meta device"):
        assert fl.materialize_module(model) is model
    assert not fl.is_deferred(model)


# -- parameters rebuilt by their type ----------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_can_be_rebuilt_by_its_type(requires_grad):
    model = fl.deferred_init(nn.Linear, 3, 3)
    for data in (torch.ones(3, 3), model.weight, model.weight.detach().half()):
        result = type(model.weight)(data, requires_grad=requires_grad)
        assert isinstance(result, nn.Parameter) and result.requires_grad is requires_grad
        assert fl.is_deferred(result) is fl.is_deferred(data)
    again = type(model.weight)(model.weight.to("cpu"), **{**vars(model.weight), "requires_grad": requires_grad})
    assert isinstance(again, nn.Parameter) and again.requires_grad is requires_grad
    with pytest.raises(TypeError, match="colour"):
        type(model.weight)(torch.ones(1), colour="red")


# -- several processes, and no JAX -------------------------------------------------------------------------------------

_PARALLEL = """
import os, sys, warnings, torch, torch.distributed as dist, firstloss as fl
from torch import nn
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
def build():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
def wrapped(kind, model):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "broadcast":
        dist.broadcast(model[0].weight.data, 0)
        return model
    from torch.distributed.fsdp import fully_shard
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
def losses(kind, model):
    model = wrapped(kind, model)
    if kind == "fsdp" and fl.is_deferred(model):
        model.to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []
    for _ in range(3):
        loss = model(torch.arange(12.).reshape(3, 4)).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        out.append(loss.item())
    return out
for kind in sys.argv[1:]:
    results = []
    for make in (lambda fn: fn(), fl.deferred_init):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            model = make(build)
            results.append(losses(kind, model))
    warned = [w for w in recorded if w.category is fl.errors.NotMaterializedWarning]
    assert len(warned) == 1, (kind, [str(w.message) for w in warned])
    assert results[0] == results[1], (kind, results)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["ddp", "broadcast", "fsdp"])
def test_collectives_materialize(kind):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    forked.run(["-c", _PARALLEL, kind], check=True, timeout=250, env=environment)


def test_a_model_is_used_before_and_after_another_is_captured():
    """It was computed for autograd's first use, so its gradients are added to the deferred weights."""

    def train(make, between):
        torch.manual_seed(0)
        model = make(nn.Linear, 4, 4)
        between()
        first = model(torch.ones(2, 4)).sum()
        make(nn.Linear, 4, 4)
        loss = first + model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss, model.weight.grad, model.bias.grad

    expected = train(lambda make, *sizes: make(*sizes), lambda: None)
    actual = train(fl.deferred_init, lambda: fl.materialize_module(fl.deferred_init(nn.Linear, 4, 4)))
    assert all(map(torch.equal, actual, expected))
