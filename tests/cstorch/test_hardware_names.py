"""Names that act on Cerebras' hardware are accepted and say once that they have no effect; others are an error."""

import warnings

import pytest
import torch
from torch import nn

import firstloss.cstorch as cstorch
from firstloss import no_effect
from firstloss.errors import BackendError, NoEffectWarning


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(no_effect, "_said", set())
    yield
    cstorch.backends.reset()


def test_flags_keep_their_values_and_say_once_that_they_have_no_effect():
    with pytest.warns(NoEffectWarning, match=r"backends.csx.precision.optimization_level is for Cerebras") as caught:
        cstorch.backends.csx.precision.optimization_level = 2
        cstorch.backends.csx.precision.optimization_level = 1
    assert len(caught) == 1 and caught[0].filename == __file__
    assert cstorch.backends.csx.precision.optimization_level == 1
    assert not cstorch.backends.csx.debug.retrace_every_iteration
    cstorch.backends.reset()
    assert not cstorch.backends.csx.precision.optimization_level


def test_annotations_leave_functions_as_they_are():
    def double(x):
        return 2 * x

    with pytest.warns(NoEffectWarning):
        assert cstorch.pol(level=1)(double) is double and cstorch.device_annotation("a")(double) is double
    assert cstorch.current_pol() is None and cstorch.make_constant(torch.ones(2)).sum() == 2
    with cstorch.name_scope("part") as name:
        assert name == "part"
    scope = cstorch.nn.Scope("part")
    x = torch.ones(2)
    assert scope(x) is x and scope.exit(x) is x and cstorch.nn.functional.enter_scope(x, "part") is x


def test_debug_names_are_paths():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    cstorch.add_debug_name(model, "model")
    assert cstorch.get_debug_name(model[1][0]) == "model.1.0" and cstorch.get_debug_name(nn.ReLU()) == "ReLU"


@pytest.mark.parametrize("make", [
    lambda: cstorch.sparse.configure({"algorithm": "static"}),
    lambda: cstorch.sparse.RigL(sparsity=0.3),
    lambda: cstorch.mesh.Shard(0),
    lambda: cstorch.nn.SelectiveGrad("*"),
    lambda: cstorch.experimental.Compression("a", "b"),
])  # fmt: skip
def test_what_would_change_results_is_an_error(make):
    with pytest.raises(BackendError, match=r"test_hardware_names.py:\d+: cstorch\.\w+\.\w+ is not supported: "):
        make()


def test_earlier_versions_arguments_of_an_executor_are_accepted():
    cstorch.backend("CPU")
    with pytest.warns(NoEffectWarning) as caught:
        config = cstorch.utils.CSConfig(num_csx=2)
        executor = cstorch.utils.data.DataExecutor([torch.ones(2)], cs_config=config, writer=object())
    assert len(caught) == 3 and config.num_csx == 2
    assert [batch.sum().item() for batch in executor] == [2]


def test_a_profile_is_accepted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with cstorch.profiler.profile(schedule=cstorch.profiler.schedule(start_step=1, end_step=2)):
            assert cstorch.profiler.ProfilerRegistry.get_profiler() is None


@pytest.mark.parametrize("name", ["CSX", "CPU"])
def test_the_device_is_an_argument_of_pytorchs_functions(name):
    device = cstorch.backend(name).device
    assert torch.empty(2, 3, device=device).shape == (2, 3) and torch.ones(2).to(device).sum() == 2
    assert nn.Linear(2, 2).to(device).weight.device == torch.device(device)
    with device:
        weight = nn.Linear(2, 2).weight
    assert weight.shape == (2, 2) and repr(device).startswith("<device of backend")
