"""`python -m benchmarks`: run all benchmarks and print one table."""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks import harness

FIGURES = (
    "materialize_llama_1b",
    "timm_vit_large",
    "fill_kernels",
    "capture_llama_405b",
    "one_rank_of_64",
    "save_initialized",
    "trace_and_lower",
    "guards",
    "deep_layers",
    "mesh_compile",
    "same_run",
    "first_loss_ways",
    "traced_loop",
    "reads",
    "step_memory",
    "time_to_first_loss",
    "every_loss",
    "loss_agreement",
    "mt19937_lanes",
    "stablehlo_llama_405b",
    "sharded_init",
    "gpu_llama_8b",
    "trainer_first_loss",
    "trainer_overhead",
    "trainer_resume",
    "step_speed",
    "operation_speed",
    "construct_on_ranks",
    "load_checkpoint",
    "load_experts",
    "zero_partitions",
    "sweep_constructors",
    "meta_idiom",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=FIGURES, action="append", help="run only this benchmark (may be repeated)")
    harness.add_arguments(parser)
    args = parser.parse_args()
    figures = []
    for name in args.only or FIGURES:
        print(name, file=sys.stderr, flush=True)
        module = importlib.import_module(f"benchmarks.{name}")
        figures.append(module.measure(harness.with_defaults(module, args)))
    harness.report(figures, args.json)
    return 0 if args.tiny or all(figure.met is not False for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
