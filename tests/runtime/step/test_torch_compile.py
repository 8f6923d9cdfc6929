"""What `torch.compile` wraps is part of a traced step, which is compiled as a whole."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.compat import torch_names
from firstloss.interpreter import Undo

dynamo = pytest.importorskip("torch._dynamo")


def trained(net, run, steps=3):
    """The losses of a few steps of `run`, a forward pass of `net`, and the weights."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = fl.trace(step) if fl.current_backend().is_xla else step
    draws = torch.Generator().manual_seed(1)
    losses = [step(torch.randn(4, 8, generator=draws)).item() for _ in range(steps)]
    return losses, [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("what", ["module", "function", "in place"])
def test_a_step_may_use_what_torch_compile_wraps(what, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    same = copy.deepcopy(net)
    fl.backend("CPU")
    expected, weights = trained(same, same)
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    fl.compile(net, backend)
    run = net
    if what == "module":
        run = torch.compile(net)
    elif what == "function":
        run = torch.compile(lambda x: net(x))
    else:
        net.compile()
    losses, updated = trained(net, run)
    assert losses == pytest.approx(expected, rel=1e-5)  # XLA sums in another order
    for a, b in zip(updated, weights, strict=True):
        torch.testing.assert_close(a, b)


def test_functions_are_compiled_again_after_the_trace(tmp_path):
    fl.backend("XLA", artifact_dir=tmp_path)
    compiled = []

    def note(graph, inputs):
        compiled.append(graph)
        return graph

    doubled = torch.compile(lambda x: x * 2, backend=note)
    assert fl.trace(lambda x: doubled(x) + 1)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert not compiled
    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0] and len(compiled) == 1


def test_the_stance_of_the_user_is_restored():
    with torch.compiler.set_stance("eager_on_recompile"):
        before = dynamo.eval_frame._stance
        with Undo() as undo, undo:
            torch_names.disable_dynamo(undo)
            assert dynamo.eval_frame._stance.stance == "force_eager"
        assert dynamo.eval_frame._stance == before


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_torchscript_function_is_the_same_at_each_call(tmp_path, recwarn):
    """PyTorch optimizes its graph at the third call."""

    def activation(x: torch.Tensor, bias: torch.Tensor):
        return (x + bias) * 0.5 * (1.0 + torch.erf((x + bias) / 1.41421))

    scripted = torch.jit.script(activation)

    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    same = copy.deepcopy(net)
    fl.backend("CPU")
    expected, _ = trained(same, lambda x: activation(same(x), same.bias), steps=6)
    fl.compile(net, fl.backend("XLA", artifact_dir=tmp_path))
    losses, _ = trained(net, lambda x: scripted(net(x), net.bias), steps=6)
    assert losses == pytest.approx(expected, rel=1e-5)  # XLA sums in another order
    assert not [warning for warning in recwarn if issubclass(warning.category, fl.errors.EagerStepWarning)]
    assert not [warning for warning in recwarn if issubclass(warning.category, fl.errors.GraphChangeWarning)]


@pytest.mark.parametrize("whole", [False, True])
def test_outside_of_a_step_a_tensor_on_a_backend_is_an_error(whole, tmp_path):
    net = nn.Linear(4, 4)
    fl.compile(net, fl.backend("XLA", artifact_dir=tmp_path))
    run = torch.compile(lambda x: net(x) + 1, backend="eager", fullgraph=whole)
    message = r"test_torch_compile.py:\d+: torch.compile has met a tensor on a backend.*set_stance\(.force_eager.\)"
    with pytest.raises(Exception, match=message):
        run(torch.ones(1, 4))
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(run(torch.ones(1, 4)), net(torch.ones(1, 4)) + 1)


_STEP_OF_ITS_OWN = """
import sys
import warnings

import torch
from torch import nn

import firstloss as fl


def update(parameters):
    for p in parameters:
        p.sub_((p.grad * 0.1).view_as(p))


def losses(backend, how, reads):
    compiled = [] if how == "late" else [torch.compile(update, backend="eager", fullgraph=True)]
    fl.backend(backend)
    torch.manual_seed(0)
    with fl.current_backend().device:
        net = nn.Linear(4, 4)
    run = fl.compile(net)

    def step(x):
        loss = run(x).square().mean()
        loss.backward()
        if reads:  # so its Python runs at each call
            loss = loss + x[x.sum(1) * loss > -1e9].sum()
        compiled.extend([] if compiled else [torch.compile(update, backend="eager", fullgraph=True)])
        with torch.no_grad():
            compiled[0](list(net.parameters()))
        net.zero_grad()
        return loss

    step = fl.trace(step) if backend == "XLA" else step
    draws = torch.Generator().manual_seed(0)
    return [step(torch.randn(3, 4, generator=draws)).item() for _ in range(5)]


how, reads = sys.argv[1], sys.argv[2] == "reads"
warnings.simplefilter("ignore", fl.errors.EagerStepWarning)
assert "torch._dynamo" not in sys.modules
actual = losses("XLA", how, reads)
assert sys.modules["torch._dynamo"].eval_frame._stance.stance == "default"
torch.testing.assert_close(actual, losses("CPU", how, reads))
"""


@pytest.mark.parametrize("reads", ["reads", "compiled"])
@pytest.mark.parametrize("how", ["before", "late"])
def test_a_list_of_weights_is_given_to_a_compiled_function(how, reads):
    """Also where the function, or dynamo itself, comes only while the step runs."""
    done = subprocess.run([sys.executable, "-c", _STEP_OF_ITS_OWN, how, reads], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
