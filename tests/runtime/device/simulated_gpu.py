"""Run by test_on_gpu.py in a separate process: the XLA backend as on a GPU shared with PyTorch, on the CPU.

The runtime does not recognize JAX's device as this CPU, although its memory is: writes through DLPack are made without
a copy, as on a GPU; and weights are computed by the GPU kernels, compiled as C.
"""

import functools
import sys
import tempfile

import jax
import torch

import firstloss as fl
from benchmarks.gpu.llama import CONFIGS, Llama
from firstloss.gpu import probe, weights
from firstloss.runtime import lazy_jax
from firstloss.runtime.device import on_gpu
from firstloss.runtime.step import first_loss
from tests.gpu.emulated import HostLauncher


def elsewhere():
    """Let every module's check for a CPU device return False."""
    original = lazy_jax.on_cpu
    for module in list(sys.modules.values()):
        if getattr(module, "on_cpu", None) is original:
            module.on_cpu = lambda: False


backend = fl.backend("XLA", artifact_dir=tempfile.mkdtemp(), first_loss=sys.argv[1])
import firstloss.runtime.step.segmentation  # noqa: E402 - and with it what would be imported later

elsewhere()
HERE = torch.device("cpu", 0)
on_gpu.device = lambda: HERE
make = functools.partial(
    weights.materialize,
    launcher=HostLauncher(),
    cpu_bits=lambda _, name, dtype: probe.cpu_type_is_supported(name, dtype),
)
counts = []


def counted(values, *args, **how):
    weights = make(values, *args, **how)
    counts.append((len(weights), len(values)))
    return weights


weights.materialize = counted
attempts = []
attempt = first_loss.FirstLoss.attempt


def noted(self, *args):
    result = attempt(self, *args)
    attempts.append((self._device, result is not None))
    return result


first_loss.FirstLoss.attempt = noted


def trained(on_backend):
    torch.manual_seed(0)
    if on_backend:
        with backend.device:
            model = Llama(CONFIGS["tiny"])
        call = fl.compile(model)
    else:
        model = call = Llama(CONFIGS["tiny"])
    # With AdamW's own epsilon, the last bits of a gradient near 0 decide the sign of a whole update.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    pointers = []

    def step(tokens, targets):
        loss = call(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = fl.trace(step) if on_backend else step
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(5):
        tokens = torch.randint(CONFIGS["tiny"].vocabulary, (2, 9), generator=generator)
        losses.append(float(step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())))
        if on_backend and len(losses) > 1:
            array = model.head.weight._storage.resident.array()
            assert isinstance(array, jax.Array)
            pointers.append(array.unsafe_buffer_pointer())
    return losses, pointers, model


losses, pointers, model = trained(True)
expected, _, eager = trained(False)
for a, b in zip(losses, expected, strict=True):
    assert abs(a - b) <= 1e-4 * abs(b), (losses, expected)
assert counts and counts[0][0] == counts[0][1] == len(list(eager.parameters())), counts
assert len(set(pointers)) == 1, pointers  # donated at every step
if sys.argv[1] == "eager":
    assert attempts == [(HERE, True)], attempts
    assert losses[0] == expected[0], (losses[0], expected[0])
else:
    assert not attempts
for (name, a), (_, b) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
    assert torch.allclose(a.detach().cpu(), b, rtol=1e-4, atol=1e-5), name  # float32, other kernels
