"""`firstloss fit CONFIG.yaml`: train what a file describes."""

from __future__ import annotations

import argparse
import os

from . import output, target

NAME = "fit"
HELP = "train what a YAML file describes; --trainer.loop.max_steps=50 and the like override it"
EXAMPLE = "firstloss fit config.yaml --trainer.loop.max_steps=50   (--print_config shows all keys)"
PASSES_ON = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml", nargs="?", help="the run: trainer, train_dataloader, ...")


def run(args: argparse.Namespace) -> int:
    from ..errors import ConfigError
    from ..files import written_aside
    from . import config

    parser, read = config.read("fit", args.config, args.overrides)
    with target.ending_only_itself("what the file describes"):
        given = config.instantiate("fit", parser, read)
    if given.train_dataloader is None:
        raise ConfigError("train_dataloader is missing.")
    trainer = given.trainer
    if trainer.processes.index == 0:
        os.makedirs(trainer.model_dir, exist_ok=True)
        del read["config"]
        with written_aside(os.path.join(trainer.model_dir, "config.yaml"), "w") as file:
            file.write(parser.dump(read, skip_unset=False))
    with target.ending_only_itself("the run"):
        trainer.fit(given.train_dataloader, given.val_dataloader, ckpt_path=given.ckpt_path)
    if args.json:
        output.print_json({"model_dir": trainer.model_dir, "checkpoint": trainer.folder.last(), **vars(trainer.state)})
    else:
        print(f"{trainer.model_dir}: step {trainer.state.step}, checkpoint {trainer.folder.last()}")
    return 0
