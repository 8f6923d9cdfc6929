"""The command line, `firstloss`. torch and jax are imported only by commands that need them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..dependencies import install
from ..errors import FirstlossError
from . import check_init, demo, doctor, fit, init, inspect, output, plan, run, schema, stablehlo, validate, verify

COMMANDS = (demo, run, inspect, init, verify, check_init, stablehlo, plan, fit, validate, schema, doctor)

# The extra that installs a missing library.
_EXTRA_OF = {
    **dict.fromkeys(("rich", "matplotlib", "jsonargparse", "yaml"), "cli"),
    **dict.fromkeys(("jax", "jaxlib"), "xla"),
    "transformers": "demo",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; errors are one line on stderr and a nonzero status.

    With FIRSTLOSS_DEBUG=1 in the environment, errors are raised with their traceback.
    """
    parser = _parser()
    args, overrides = parser.parse_known_args(argv)
    if overrides and not args.accepts_overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    args.overrides = overrides
    try:
        with output.only_json(keep=argv is None) if args.json else contextlib.nullcontext():
            return args.run(args)
    except KeyboardInterrupt:
        return _fail(args.command, "interrupted", status=130)
    except BrokenPipeError:  # as in `firstloss verify ... | head`
        sys.stdout = open(os.devnull, "w")
        return 1
    except Exception as error:
        if os.environ.get("FIRSTLOSS_DEBUG"):
            raise
        return _fail(args.command, _describe(error))


def _describe(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRA_OF:
        return f"{error.name} is not installed: {install(_EXTRA_OF[error.name])}"
    if isinstance(error, FirstlossError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error} (set FIRSTLOSS_DEBUG=1 for the traceback)"


def _fail(command: str, message: str, status: int = 1) -> int:
    print(f"firstloss {command}: {' '.join(message.split())}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line that points to --help, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="firstloss",
        description="Shorten the time from `python train.py` to the first loss of a PyTorch model.",
        epilog="example: firstloss demo --out demo",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.HELP[0].upper() + command.HELP[1:] + ".",
            epilog=f"example:\n  {command.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
        sub.set_defaults(run=command.run, accepts_overrides=getattr(command, "ACCEPTS_OVERRIDES", False))
    return parser
