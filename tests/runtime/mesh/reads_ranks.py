"""One of two processes that train by steps which read numbers, or with port 0 eager PyTorch:
python reads_ranks.py FOLDER PORT RANK.

Each prints its results as a line of JSON.
"""

import json
import math
import sys
import warnings

folder, port, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if port:
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import firstloss as fl  # noqa: E402

MESH = {"fsdp": 4}
backend = fl.backend("XLA", mesh=MESH, artifact_dir=f"{folder}/artifacts{rank}") if port else fl.backend("CPU")


class Run:
    """A model, its optimizer, what its step keeps, and how often its Python has run."""

    def __init__(self):
        torch.manual_seed(0)
        with backend.device:
            self.model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 8), nn.Linear(8, 2))
        self.call = fl.compile(self.model, backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.kept, self.total, self.skipped, self.ran = [], 0.0, 0, 0

    def loss(self, x):
        self.ran += 1
        return self.call(x).square().mean()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(run, x):
    loss = run.loss(x)
    loss.backward()
    run.update()
    return loss


def keep(run, x):
    loss = plain(run, x)
    run.kept.append(loss.item())
    run.total += loss.item()
    return loss


def branch(run, x):
    loss = run.loss(x)
    loss.backward()
    if not loss.isfinite():
        run.skipped += 1
        run.optimizer.zero_grad()
        return loss
    run.update()
    return loss


def clip(run, x):
    loss = run.loss(x)
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in run.model.parameters()]).sum().sqrt()
    scale = min(1.0, 0.1 / norm.item())
    for p in run.model.parameters():
        p.grad.mul_(scale)
    run.update()
    run.kept.append(norm.item())
    return loss


def element(run, x):
    loss = plain(run, x)
    run.kept.append(x[0, 1].item() + run.model[2].weight.detach()[3, 5].item())
    return loss


def rate(run, x):
    loss = run.loss(x)
    loss.backward()
    for group in run.optimizer.param_groups:
        group["lr"] = 0.05 if loss > 0.02 else 0.01
    run.update()
    return loss


def nan(run, x):
    loss = run.loss(x)
    loss.backward()
    if math.isnan(loss.item()) or not np.isfinite(run.model[0].bias.grad.norm().item()):
        run.skipped += 1
        run.optimizer.zero_grad()
    else:
        run.update()
    return loss


def mask(run, x):
    loss = plain(run, x)
    return loss + x[x > 0].sum()


def listed(run, x):
    loss = plain(run, x)
    run.kept += x[0].tolist()
    return loss


def sized(run, x):
    loss = plain(run, x)
    return loss + sum(x[: int(loss.item() * 0) + 2].flatten()[:1])


batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(n)) for n in range(8)]
batches[4] = torch.full((8, 4), torch.inf)
results = {}
warnings.simplefilter("ignore")
for step in (plain, keep, branch, clip, element, rate, nan, mask, listed, sized):
    run = Run()
    traced, losses, error = fl.trace(lambda x, run=run, step=step: step(run, x)), [], None
    try:
        for x in batches if step in (branch, nan) else batches[:4] + batches[5:]:
            losses.append(traced(x).item())
    except fl.errors.FirstlossError as refused:
        error = f"{type(refused).__name__}: {refused}"
    names = [name for name, _ in run.model.named_parameters()]
    gather = fl.distributed.gather if port else lambda tensor: tensor.detach()
    weights = [] if error else [float(gather(p).abs().sum()) for p in run.model.parameters()]
    results[step.__name__] = {
        "losses": losses, "kept": run.kept, "numbers": [run.total, run.skipped], "weights": weights, "error": error,
        "compiled": traced._cache.compilations() if port else 0,
    }  # fmt: skip
print(json.dumps(results))
