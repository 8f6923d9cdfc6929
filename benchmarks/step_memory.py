"""Peak memory of placing weights and of a training step, against the size of parameters, state and activations.

Activations are the tensors that autograd saves for the backward pass, each counted once, in an eager run of the same
step. Gradients gradually replace them, so in addition to parameters and state a step has to hold the larger of the
two. Measured is the peak of the process's resident memory, reset by Linux before each phase, relative to before the
model: what the libraries and the compiler hold by then is not counted, and reported separately. malloc is configured
as for users (`firstloss.malloc_settings.map_arrays`); a configuration that returns all freed memory, and glibc's
default, are shown in additional rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

from benchmarks import harness, models

NAME = "peak memory of placement and of a training step, Llama of 0.1B parameters, SGD with momentum"
GOAL = "within 10% of the size of parameters, state and activations"
FIELDS = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
STEPS = 3
# glibc's default, except that the environment has the setting's name, so that Firstloss does not change it.
GLIBC = {"MALLOC_ARENA_TEST": "8"}
SIDES = {"needed": {}, "firstloss": {}, "exact": harness.EXACT, "glibc": GLIBC}


def child(side, args):
    import torch

    import firstloss as fl

    models.import_llama()
    fields = models.LLAMA_TINY if args.tiny else FIELDS
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(fields["vocab_size"], (1, 64) if args.tiny else (4, 256), generator=generator)
    torch.manual_seed(0)
    if side == "needed":
        return needed(models.llama(**fields), batch)
    with tempfile.TemporaryDirectory() as artifacts:
        backend = fl.backend("XLA", artifact_dir=artifacts)
        # objects created once: imports, caches, thread pools
        model, optimizer, step = prepare(backend, models.LLAMA_TINY)
        for _ in range(2):  # the second waits for the compiler
            step(batch[:1] % 256).item()
        backend.models.clear()
        del model, optimizer, step
        before = harness.settled()
        model, optimizer, step = prepare(backend, fields)
        harness.reset_peak()
        for parameter in model.parameters():
            parameter._storage.resident.array()
        found = {"placement": harness.peak() - before}
        step(batch)
        wait(model)
        own = harness.settled() - before - live(model, optimizer)  # memory left by tracing and compiling
        harness.reset_peak()
        began = time.perf_counter()
        for _ in range(STEPS):
            step(batch)
        wait(model)
        seconds = (time.perf_counter() - began) / STEPS
        found |= {"step": harness.peak() - before - own, "left": own, "seconds": seconds}
    return found


def prepare(backend, fields):
    import torch

    with backend.device:
        model = models.llama(**fields)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return model, optimizer, models.training_step(model, optimizer, backend)


def needed(model, batch):
    """Bytes of parameters, optimizer state, and tensors saved by autograd, in eager PyTorch."""
    import torch

    parameters = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=batch, labels=batch).loss
    return {
        "parameters": sum(parameters.values()),
        "state": sum(parameters.values()),
        "activations": sum(kept.values()),
        "loss": loss.item(),
    }


def wait(model):
    """Wait for the last step: its loss is available before its backward pass."""
    for parameter in model.parameters():
        parameter._storage.resident.array().block_until_ready()


def live(model, optimizer):
    tensors = [*model.parameters(), *(v for entries in optimizer.state.values() for v in entries.values())]
    return sum(t.numel() * t.itemsize for t in tensors)


def measure(args):
    def run(side):
        child = "needed" if side == "needed" else "firstloss"
        command = [sys.executable, "-m", "benchmarks.step_memory", "--child", child, *(["--tiny"] if args.tiny else [])]
        return json.loads(harness.output_of(command, SIDES[side]).splitlines()[-1])

    runs = harness.interleaved(tuple(SIDES), args.rounds, run)
    takes, ours = runs["needed"][0], runs["firstloss"]
    both = takes["parameters"] + takes["state"]
    least = both + max(takes["activations"], takes["parameters"])
    placement, step = harness.middle(ours, "placement"), harness.middle(ours, "step")

    def of_a_step(side):
        found = harness.middle(runs[side], "step")
        return f"{megabytes(found)}, {found / least:.3f} of that, {harness.middle(runs[side], 'seconds'):.2f} s"

    rows = [
        ("parameters", megabytes(takes["parameters"])),
        ("optimizer state", megabytes(takes["state"])),
        ("activations (gradients take as much as the parameters)", megabytes(takes["activations"])),
        ("peak of placement", f"{megabytes(placement)}, {placement / takes['parameters']:.3f} times the parameters"),
        ("a step has to hold", megabytes(least)),
        ("peak of a step, and its time", of_a_step("firstloss")),
        ("  with a heap that keeps nothing", of_a_step("exact")),
        ("  with glibc's own settings", of_a_step("glibc")),
        ("left by tracing and compiling", megabytes(harness.middle(ours, "left"))),
    ]
    met = placement <= 1.1 * takes["parameters"] and step <= 1.1 * least
    return harness.Figure(NAME, GOAL, rows, met, {"runs": runs})


def megabytes(count):
    return f"{count / 1e6:,.0f} MB"


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
