"""`firstloss fit CONFIG.yaml`: train as a YAML file describes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any

from . import output, target

NAME = "fit"
HELP = "train as a YAML file describes; options such as --trainer.loop.max_steps=50 override it"
EXAMPLE = "firstloss fit config.yaml --trainer.loop.max_steps=50   (--print_config shows all keys)"
ACCEPTS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG.yaml", nargs="?", help="the run file (trainer, train_dataloader, ...)"
    )


def run(args: argparse.Namespace) -> int:
    from ..errors import ConfigError
    from ..files import atomic_write
    from . import config

    described = config.read_model_zoo(args.config, args.overrides)
    if described is not None:
        return model_zoo(args, described, ("fit",))
    parser, read = config.read("fit", args.config, args.overrides)
    with target.exits_as_errors("the code named in the file"):
        given = config.instantiate("fit", parser, read)
    if given.train_dataloader is None:
        raise ConfigError("train_dataloader is missing.")
    trainer = given.trainer
    if trainer.processes.index == 0:
        os.makedirs(trainer.model_dir, exist_ok=True)
        del read["config"]
        with atomic_write(os.path.join(trainer.model_dir, "config.yaml"), "w") as file:
            file.write(parser.dump(read, skip_unset=False))
    with target.exits_as_errors("the run"):
        trainer.fit(given.train_dataloader, given.val_dataloader, ckpt_path=given.ckpt_path)
    if args.json:
        output.print_json({"model_dir": trainer.model_dir, "checkpoint": trainer.folder.last(), **vars(trainer.state)})
    else:
        print(f"{trainer.model_dir}: step {trainer.state.step}, checkpoint {trainer.folder.last()}")
    return 0


def model_zoo(args: argparse.Namespace, phases: Iterable[Any], wanted: tuple[str, ...]) -> int:
    """Run the calls `wanted` ("fit", "validate", ...) that a file in Model Zoo's layout has, in turn."""
    from ..errors import ConfigError

    ran = [_run_phase(args, phase, wanted) for phase in phases]
    if not any(ran):
        raise ConfigError(f"{args.config}: trainer has no {' and no '.join(wanted)}, so there is nothing to do.")
    return 0


def _run_phase(args: argparse.Namespace, described: Any, wanted: tuple[str, ...]) -> bool:
    trainer, validated = described.trainer, {}
    if not any(call in described.calls for call in wanted):
        return False
    with target.exits_as_errors("the run"):
        for call in wanted:
            if call in described.calls:
                validated[call] = getattr(trainer, call)(**described.calls[call])
    metrics = {str(name): value for name, value in validated.items() if value is not None}
    if args.json:
        last = trainer.folder.last()
        metrics_by_checkpoint = {name: {str(key): value for key, value in of.items()} for name, of in metrics.items()}
        output.print_json(
            {"model_dir": trainer.model_dir, "checkpoint": last, **vars(trainer.state), **metrics_by_checkpoint}
        )
    else:
        print(f"{trainer.model_dir}: step {trainer.state.step}, checkpoint {trainer.folder.last()}")
        for call, value in metrics.items():
            print(f"{call}: {value}")
    return True
