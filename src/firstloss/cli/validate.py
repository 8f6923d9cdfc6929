"""`firstloss validate CONFIG.yaml`: validate a checkpoint of the run that a file describes."""

from __future__ import annotations

import argparse

from . import output, target

NAME = "validate"
HELP = "validate the last checkpoint of the run that a YAML file describes, or the one given by --ckpt_path"
EXAMPLE = "firstloss validate config.yaml --ckpt_path=run/checkpoints/step_100"
ACCEPTS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="the run file (trainer, val_dataloader, ...)")


def run(args: argparse.Namespace) -> int:
    from ..errors import ConfigError
    from . import config
    from .fit import model_zoo

    described = config.read_model_zoo(args.config, args.overrides)
    if described is not None:
        return model_zoo(args, described, ("validate", "validate_all"))
    parser, read = config.read("validate", args.config, args.overrides)
    with target.exits_as_errors("the code named in the file"):
        given = config.instantiate("validate", parser, read)
    if given.val_dataloader is None:
        raise ConfigError("val_dataloader is missing.")
    with target.exits_as_errors("the run"):
        metrics = given.trainer.validate(given.val_dataloader, ckpt_path=given.ckpt_path)
    if args.json:
        output.print_json(metrics)
    else:
        for name, value in metrics.items():
            print(f"{name} {value:.6g}")
    return 0
