"""`firstloss inspect TARGET`: what a constructor would make, without making it."""

from __future__ import annotations

import argparse

from . import output, target

NAME = "inspect"
HELP = "show what a target would make: each weight, its recipe, its place in the random stream; makes nothing"
EXAMPLE = "firstloss inspect path/to/config.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    wanted = target.load(args.target, args.arg)

    import firstloss as fl

    program = fl.init_program(fl.deferred_init(wanted))
    if args.json:
        output.print_json({"target": wanted.text, **program.report().to_dict()})
    else:
        print(program.report())
    return 0
