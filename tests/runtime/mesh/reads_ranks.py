"""One of two processes that train by steps which read numbers, or with port 0 eager PyTorch:
python reads_ranks.py FOLDER PORT RANK.

Each prints its results as a line of JSON.
"""

import json
import math
import pickle
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
import torch.nn.functional as F  # noqa: E402
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


def masked(run, x):
    run.ran += 1
    h = run.model[1](run.model[0](x))
    chosen = h[x[:, 0] > 0]
    loss = run.model[3](run.model[2](chosen)).square().mean() + F.relu(h).masked_select(h > 0.5).sum() * 0.01
    loss.backward()
    run.update()
    return loss


def unique(run, x):
    loss = plain(run, x)
    values, counts = (x[:, :2] > 0).long().unique(return_counts=True)
    run.kept += [len(values), counts.max().item(), *torch.nonzero(x[0] > 0).flatten().tolist()]
    return loss


def written(run, x):
    loss = plain(run, x)
    run.kept.append(float(f"{loss:.4f}") + float(loss) + float(str(round(loss.item(), 3))))
    return loss


def array(run, x):
    loss = plain(run, x)
    run.kept.append(float(np.abs(run.model[2].weight.detach().numpy()).max()))
    run.kept += pickle.loads(pickle.dumps(x[0])).tolist()
    return loss


def search(run, x):
    """Halves a factor until the loss has fallen, a different number of times at each call."""
    loss = run.loss(x)
    loss.backward()
    factor, done = 64.0, 0
    grads = [p.grad.clone() for p in run.model.parameters()]
    with torch.no_grad():
        while True:
            for p, grad in zip(run.model.parameters(), grads, strict=True):
                p.sub_(factor * grad)
            if float(run.call(x).square().mean()) < float(loss) or done > 8:
                break
            for p, grad in zip(run.model.parameters(), grads, strict=True):
                p.add_(factor * grad)
            factor, done = factor / 4, done + 1
    run.kept.append(done)
    run.optimizer.zero_grad()
    return loss


def hooked(run, x):
    def note(grad):
        run.kept += grad.abs().amax(1)[:2].tolist()

    h = run.model[0](x)
    h.register_hook(note)
    loss = run.model[3](run.model[2](run.model[1](h))).square().mean()
    loss.backward()
    run.update()
    return loss


def seldom(run, x):
    loss = plain(run, x)
    run.skipped += 1
    if run.skipped % 3 == 1:
        run.kept += x[0].tolist()
    return loss


STEPS = (plain, keep, branch, clip, element, rate, nan, mask, listed, sized, masked, unique, written, array, search,
         hooked, seldom)  # fmt: skip
batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(n)) for n in range(8)]
batches[4] = torch.full((8, 4), torch.inf)
results = {}
warnings.simplefilter("ignore")
for step in STEPS:
    run = Run()
    traced, losses, error = fl.trace(lambda x, run=run, step=step: step(run, x)), [], None
    try:
        for x in batches[:6] if step in (branch, nan) else batches[:4]:
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
