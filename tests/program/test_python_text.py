"""`print(program)` is Python code that runs and gives the same bits."""

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.capture.deferred import named_tensors
from firstloss.engine.replay import Replay
from tests.capture.eager_comparison import seed_all
from tests.fuzz import constructors as fuzz
from tests.replay.record import Odd


def deferred(build, policy="eager"):
    seed_all(0)
    with fl.deferred(rng=policy):
        return build()


def executed(program, *inputs):
    """The outputs of running a Program's printed text."""
    scope = program.scope()
    exec(str(program), scope)
    return scope["program"](*inputs)


def bits(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def assert_same(actual, expected):
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(bits(actual), bits(expected))


def fuzzed(seed):
    scope = {"Holder": fuzz.Holder, "__name__": "constructor"}
    exec(compile(fuzz.generate(seed), f"<fuzzed {seed}>", "exec"), scope)
    return scope["build"]


@pytest.mark.parametrize("policy", ["eager", "counter"])
@pytest.mark.parametrize("build", [Odd, *map(fuzzed, range(60))], ids=["odd", *map(str, range(60))])
def test_a_constructors_text_makes_its_weights(build, policy):
    module = deferred(build, policy)
    try:
        program = fl.init_program(module)
    except fl.errors.NothingDeferredError:
        pytest.skip("it makes all of its tensors at once")
    before = torch.get_rng_state()
    actual = executed(program.program)
    assert torch.equal(torch.get_rng_state(), before)
    recipes = program.recipes
    fl.materialize_module(module)
    expected = {name: tensor for name, tensor, _ in named_tensors(module) if name in recipes}
    assert expected and expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert_same(actual[name], tensor)


def test_a_recipes_text_makes_its_weight_alone():
    module = deferred(Odd)
    recipes = fl.init_program(module).recipes
    result = {name: executed(recipe.program)[recipe.name] for name, recipe in recipes.items()}
    lines = str(recipes["part"].program).splitlines()
    assert sum("draw(" in line for line in lines) == 1 and sum("aten." in line for line in lines) == 2
    fl.materialize_module(module)
    for name, tensor, _ in named_tensors(module):
        if name in recipes:
            assert_same(result[name], tensor)


def test_a_text_can_be_run_twice():
    class Edited(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            with torch.no_grad():
                self.table[1].mul_(torch.rand(2))

    program = fl.init_program(deferred(Edited)).program
    scope = program.scope()
    exec(str(program), scope)
    first = scope["program"]()["table"].clone()
    assert_same(scope["program"]()["table"], first)


def traced_program(build, shape, folder):
    """The Program of a training step, and the first batch."""
    backend = fl.backend("XLA", artifact_dir=str(folder))
    torch.manual_seed(0)
    with backend.device:
        model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(batch):
        loss = compiled(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batch = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    step(batch)
    return step.program(), batch


class Pooled(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


class Attention(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(16, 2, 32, dropout=0.0, batch_first=True)


@pytest.mark.parametrize(("build", "shape"), [(Pooled, (2, 3, 10, 10)), (Attention, (2, 5, 16))])
def test_a_steps_text_computes_what_its_nodes_do(build, shape, tmp_path):
    program, _ = traced_program(build, shape, tmp_path)
    arguments = [
        torch.rand(value.shape, generator=torch.Generator().manual_seed(number)).to(value.dtype)
        for number, value in enumerate(program.inputs.values())
    ]
    kept = [tensor.clone() for tensor in arguments]
    result = executed(program, *arguments)
    assert len(kept) > 0 and all(
        torch.equal(a, b) for a, b in zip(arguments, kept, strict=True)
    )  # written inputs are copied
    replay = Replay()
    for value, tensor in zip(program.inputs.values(), arguments, strict=True):
        replay.buffers[value] = value.empty().copy_(tensor)
    replay.run(program.nodes)
    for name, ref in program.outputs.items():
        assert_same(result[name], ref.view(replay.buffer(ref.value)))


def test_a_steps_text_draws_the_same_numbers_each_time(tmp_path):
    program, batch = traced_program(lambda: nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5)), (16, 8), tmp_path)
    arguments = [batch, *(torch.ones(value.shape, dtype=value.dtype) for value in list(program.inputs.values())[1:])]
    result = executed(program, *arguments)
    assert "draw(" in str(program) and result
    for name, again in executed(program, *arguments).items():
        assert_same(again, result[name])


def test_a_steps_text_matches_eagers_step(tmp_path):
    def build():
        return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

    program, batch = traced_program(build, (16, 8), tmp_path)
    torch.manual_seed(0)
    eager = build()
    weights = {tuple(weight.shape): weight for weight in eager.parameters()}  # all of different shapes
    arguments = []
    for label, value in program.inputs.items():
        lr = torch.tensor(0.1, dtype=value.dtype)
        arguments.append(batch if label.startswith("batch") else lr if label.startswith("lr") else None)
    arguments = [
        weights.pop(value.shape, torch.zeros(value.shape, dtype=value.dtype)).detach().clone() if x is None else x
        for x, value in zip(arguments, program.inputs.values(), strict=True)
    ]
    loss = eager(batch).square().mean()
    assert_same(executed(program, *arguments)["out0"], loss)
