"""Trace and lower the whole training step of a 24-layer Llama, against tracing alone with PyTorch's tools."""

from __future__ import annotations

import sys
import tempfile
import time

from benchmarks import harness, models

NAME = "trace and lower the step of a 24-layer Llama (hidden 64) with AdamW"
GOAL = "under 4 s"


def child(side, args):
    import torch

    torch.manual_seed(0)
    fields = models.LLAMA_TINY if args.tiny else models.LLAMA_24_LAYERS
    batch = torch.randint(256, (2, 32))
    models.import_llama()
    return firstloss_road(fields, batch) if side == "firstloss" else plain_road(fields, batch)


def firstloss_road(fields, batch):
    """Trace and lower like the XLA backend in the first step; the rest of that step is not counted."""
    import torch

    import firstloss as fl
    from firstloss import timeline

    with tempfile.TemporaryDirectory() as artifacts:
        backend = fl.backend("XLA", artifact_dir=artifacts, first_loss="compiled")  # compile before the first loss
        with backend.device:
            model = models.llama(**fields)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = models.training_step(model, optimizer, backend)
        step(batch).item()
    phases = {name: timeline.current().seconds(name) for name in ("trace", "lower", "compile")}
    return {**phases, "seconds": phases["trace"] + phases["lower"]}


def plain_road(fields, batch):
    """The same step as one functional ATen graph, through make_fx and functionalization, without lowering."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.optim.adamw import adamw

    model = models.llama(**fields)
    names = [name for name, _ in model.named_parameters()]
    parameters = [parameter.detach() for parameter in model.parameters()]

    def loss_of(named, buffers, batch):
        return torch.func.functional_call(model, {**named, **buffers}, (), {"input_ids": batch, "labels": batch}).loss

    def step(parameters, buffers, averages, squares, steps, batch):
        named = dict(zip(names, parameters, strict=True))
        gradients, loss = torch.func.grad_and_value(loss_of)(named, buffers, batch)
        settings = {"beta1": 0.9, "beta2": 0.999, "lr": 1e-3, "weight_decay": 0.01, "eps": 1e-8}
        states = (parameters, list(gradients.values()), averages, squares, [], steps)
        with torch.no_grad():
            adamw(*states, foreach=False, capturable=False, amsgrad=False, maximize=False, **settings)
        return loss, parameters, averages, squares, steps

    def zeros():
        return [torch.zeros_like(parameter) for parameter in parameters]

    steps = [torch.zeros(()) for _ in parameters]
    inputs = (parameters, dict(model.named_buffers()), zeros(), zeros(), steps, batch)
    began = time.perf_counter()
    graph = make_fx(torch.func.functionalize(step), tracing_mode="fake")(*inputs)
    return {"seconds": time.perf_counter() - began, "nodes": len(graph.graph.nodes)}


def measure(args):
    runs = harness.interleaved(
        ("firstloss", "plain"), args.rounds, lambda side: harness.in_child("trace_and_lower", side, args)
    )
    ours, plain = runs["firstloss"], runs["plain"]
    seconds = harness.middle(ours, "seconds")
    rows = [
        ("trace", f"{harness.middle(ours, 'trace'):.2f} s"),
        ("lower", f"{harness.middle(ours, 'lower'):.2f} s"),
        ("trace and lower", f"{seconds:.2f} s"),
        ("PyTorch's own tracing alone", f"{harness.middle(plain, 'seconds'):.2f} s"),
        ("faster", f"{harness.ratio(plain, ours, 'seconds'):.2f} times"),
    ]
    return harness.Figure(NAME, GOAL, rows, seconds < 4, {"runs": runs})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
