"""Capture and materialize timm's ViT-L, whose weights are truncated normals, against its eager construction.

timm has its own truncated normal (by the inverse error function); torch's, by rejection, is measured on the same
shapes.
"""

from __future__ import annotations

import hashlib
import sys
import time

from benchmarks import harness, sweep_constructors

NAME = "materialize timm's ViT-L, float32"
GOAL = "5 times faster than eager construction, bit-identical"
SIDES = ("eager", "deferred", "eager, torch's", "deferred, torch's")


def build(tiny: bool, rejection: bool):
    """The model; if `rejection`, its weight matrices are initialized again by `torch.nn.init.trunc_normal_`."""
    import timm
    import torch

    model = timm.create_model("vit_tiny_patch16_224" if tiny else "vit_large_patch16_224")
    if rejection:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)
    return model


def child(side, args):
    import torch

    import firstloss as fl

    sweep_constructors.prepare()
    import timm  # noqa: F401 - not timed

    assert fl.deferred_init and fl.materialize_module  # imported now: likewise

    kind, _, rejection = side.partition(", ")
    harness.warm_memory(1 << 20 if args.tiny else 3 << 30, args)
    torch.manual_seed(0)
    began = time.perf_counter()
    found = {}
    if kind == "eager":
        model = build(args.tiny, bool(rejection))
    else:
        model = fl.deferred_init(build, args.tiny, bool(rejection))
        found["capture"] = time.perf_counter() - began
        fl.materialize_module(model)
    found["seconds"] = time.perf_counter() - began
    digest = hashlib.sha256(torch.get_rng_state().numpy())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    found["digest"] = digest.hexdigest()
    return found


def measure(args):
    runs = harness.interleaved(SIDES, args.rounds, lambda side: harness.in_child("timm_vit_large", side, args))
    rows, ratios, identical = [], [], True
    for label, eager, deferred in (
        ("timm's trunc_normal_", runs[SIDES[0]], runs[SIDES[1]]),
        ("torch's, at two standard deviations", runs[SIDES[2]], runs[SIDES[3]]),
    ):
        ratios.append(harness.ratio(eager, deferred, "seconds"))
        identical &= len({run["digest"] for run in eager + deferred}) == 1
        rows += [
            (f"{label}: eager construction", f"{harness.middle(eager, 'seconds'):.2f} s"),
            (f"{label}: capture", f"{harness.middle(deferred, 'capture'):.2f} s"),
            (f"{label}: capture and materialize", f"{harness.middle(deferred, 'seconds'):.2f} s"),
            (f"{label}: faster", f"{ratios[-1]:.2f} times"),
        ]
    rows.append(("bit-identical, generator too", "yes" if identical else "NO"))
    return harness.Figure(NAME, GOAL, rows, identical and min(ratios) >= 5, {"runs": runs, "ratios": ratios})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
