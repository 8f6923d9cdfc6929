"""Llama-3.1-405B as one StableHLO module for a mesh of 4,096 devices: time, size, and the work of one device."""

from __future__ import annotations

import sys
import time
import warnings

from benchmarks import harness, models

NAME = "StableHLO of Llama-3.1-405B's constructor, 16 x 16 x 16 devices"
GOAL = "under 5 s; the text for 126 layers at most 1.2 times that for 32, apart from calls"
MESH = {"data": 16, "fsdp": 16, "tp": 16}
ALL = ("data", "fsdp", "tp")
SPECS = {"*": (ALL,)}  # rows, over all devices: the cheapest draw
TENSOR_PARALLEL = {
    **{f"*.{name}_proj.weight": ("tp", ("data", "fsdp")) for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj.weight": (("data", "fsdp"), "tp") for name in ("o", "down")},
    "*norm.weight": (),
    "*": ("tp", ("data", "fsdp")),
}


def child(side, args):
    import torch

    import firstloss as fl

    warnings.simplefilter("ignore")  # of dimensions that 4,096 does not divide
    models.import_llama()
    fl.init_program(fl.deferred_init(models.llama, **models.LLAMA_TINY)).to_stablehlo()  # imports
    fields = {**(models.LLAMA_TINY if args.tiny else models.LLAMA_405B), "num_hidden_layers": int(side)}
    torch.manual_seed(0)
    began = time.perf_counter()
    module = fl.deferred_init(models.llama, **fields)
    found = {"capture": time.perf_counter() - began}
    mesh, specs = (None, None) if args.tiny else (MESH, _fitting(module, SPECS))
    program = fl.init_program(module)
    began = time.perf_counter()
    text = program.to_stablehlo(mesh, specs)
    found["seconds"] = time.perf_counter() - began
    main, _, functions = text.partition("func.func private")
    found |= {"bytes": len(text), "lines": text.count("\n"), "functions": len(functions), "calls": main.count("call @")}
    found["plan"] = program.plan(mesh, specs).to_dict()
    if not args.tiny:
        found["tensor_parallel"] = program.plan(mesh, _fitting(module, TENSOR_PARALLEL)).to_dict()
        with fl.deferred(rng="counter"):
            counted = models.llama(**fields)
        program = fl.init_program(counted)
        found["counter"] = program.plan(mesh, _fitting(counted, TENSOR_PARALLEL)).to_dict()
    return found


def _fitting(module, specs):
    """`specs`, except that one-dimensional weights are replicated: they are not worth sharding so finely."""
    small = {name: () for name, t in [*module.named_parameters(), *module.named_buffers()] if t.dim() < 2}
    return {**small, **specs}


def measure(args):
    runs = harness.interleaved(
        ("126", "32"), args.rounds, lambda side: harness.in_child("stablehlo_llama_405b", side, args)
    )
    large, small = runs["126"], runs["32"]
    plan = large[0]["plan"]
    ratio = large[0]["functions"] / small[0]["functions"]
    rows = [
        ("capture", f"{harness.middle(large, 'capture'):.2f} s"),
        ("plan, lower and print", f"{harness.middle(large, 'seconds'):.2f} s"),
        ("text", f"{large[0]['bytes']:,} bytes, {large[0]['lines']:,} lines, {large[0]['calls']:,} calls"),
        ("its functions, relative to 32 layers", f"{ratio:.3f} times as long"),
        ("bytes per device", f"{plan['bytes_per_device']:,} of {plan['bytes']:,}"),
        ("random words drawn per device", f"{plan['words_per_device']:,}"),
        ("compiled functions per device", f"{plan['compile_units']}"),
    ]
    if not args.tiny:
        rows += [
            ("words, if columns are split too", f"{large[0]['tensor_parallel']['words_per_device']:,}"),
            ('the same with rng="counter"', f"{large[0]['counter']['words_per_device']:,}"),
        ]
    met = harness.middle(large, "seconds") < 5 and ratio <= 1.2
    return harness.Figure(NAME, GOAL, rows, met, {"runs": runs})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
