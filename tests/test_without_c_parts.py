"""Everything works without the parts in C, as installed without a compiler: the same bits, the same guards."""

import subprocess
import sys
import weakref

import torch

from firstloss.runtime.guards import recording
from firstloss.runtime.guards.external_state import ExternalCalls

PROGRAM = """
import sys, warnings
sys.modules["firstloss.runtime.guards._guards"] = None
from firstloss import c_library, errors
c_library.load = lambda module, name, functions: c_library.warn_missing(name, "left out")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    from torch import nn
    import firstloss as fl

    def make():
        torch.manual_seed(2)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.0)) for _ in range(2)]
        model = nn.Sequential(*layers, nn.Linear(16, 4))
        nn.init.trunc_normal_(model[2].weight)
        nn.init.orthogonal_(model[2].weight.data[:, :8])
        model.register_buffer("drawn", torch.cat([torch.randn(50), torch.rand(50), torch.empty(50).exponential_()]))
        return model

    eager, deferred = make(), fl.materialize_module(fl.deferred_init(make))
    for name, tensor in eager.state_dict().items():
        assert torch.equal(tensor, deferred.state_dict()[name]), name

    backend = fl.backend("XLA", artifact_dir=sys.argv[1])
    with backend.device:
        model = make()
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"scale": 1.0}

    @fl.trace
    def step(x):
        loss = compiled(x).square().mean() * settings["scale"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    eagers = torch.optim.AdamW(eager.parameters(), lr=0.01)
    for number in range(6):
        if number == 4:
            settings["scale"] = 2.0
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        loss = step(x).item()
        expected = eager(x).square().mean() * settings["scale"]
        expected.backward()
        eagers.step()
        eagers.zero_grad()
        # float32, XLA's order of sums. Measured: 2e-7.
        assert abs(loss - expected.item()) < 1e-5 * abs(expected.item()), (number, loss, expected.item())
kinds = [warning.category for warning in caught if issubclass(warning.category, Warning)]
assert kinds.count(errors.MissingKernelsWarning) == 1, kinds
changes = [str(w.message) for w in caught if w.category is errors.GraphChangeWarning]
assert len(changes) <= 1 and all("scale" in change for change in changes), changes  # a float that changed, and no more
print("fine")
"""


def test_a_model_is_initialized_and_trained_without_the_parts_in_c(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "fine", done.stderr[-3000:]


def test_recording_does_not_keep_the_objects_whose_methods_are_called():
    """PyTorch would copy a gradient that somebody else holds, which would be another graph."""
    record = recording._profiler({}, [], ExternalCalls().called)
    tensor = torch.ones(2)
    alive = weakref.ref(tensor)
    record(sys._getframe(), "c_call", tensor.detach)
    del tensor
    assert alive() is None
