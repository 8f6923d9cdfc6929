"""TARGET, what a command constructs: a callable by its name, or a Hugging Face config.json."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import FirstlossError, TargetError

_FORMS = "write package.module:callable, such as torch.nn:Linear, or the path of a Hugging Face config.json"


@dataclass(frozen=True)
class Target:
    """A constructor with its arguments; a call constructs.

    Exceptions of the user's constructor become a TargetError that names the user's line.
    """

    text: str
    constructor: Callable[..., Any]
    arguments: dict[str, Any]

    def __call__(self) -> Any:
        with _errors_as_target_errors(self.text, "the constructor raised"):
            return self.constructor(**self.arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add TARGET and --arg, which are the same for every command."""
    parser.add_argument("target", metavar="TARGET", help="package.module:callable, or a Hugging Face config.json")
    parser.add_argument(
        "--arg",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an argument of the callable, or a config field to change; VALUE is a Python literal or a string",
    )


def add_random_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --seed and --rng."""
    parser.add_argument("--seed", type=int, default=0, help="the seed that the constructor starts from (default 0)")
    parser.add_argument(
        "--rng",
        choices=("eager", "counter"),
        default="eager",
        help="random numbers of eager PyTorch (default), or of the counter policy",
    )


def load(text: str, arguments: Sequence[str] = ()) -> Target:
    """Find the TARGET `text`, and check it as far as possible without calling it."""
    values = dict(_argument(argument) for argument in arguments)
    if text.endswith(".json") or os.path.isdir(text):
        return _from_config(text, values)
    module_name, colon, path = text.partition(":")
    if not (colon and module_name and path):
        raise TargetError(f"TARGET {text!r} does not name a callable: {_FORMS}")
    constructor = _attribute(text, _module(text, module_name), path)
    if not callable(constructor):
        raise TargetError(f"TARGET {text!r} is of type {type(constructor).__name__}, which is not callable: {_FORMS}")
    _check_signature(text, constructor, values)
    return Target(text, constructor, values)


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise TargetError(f"--arg {text!r} is not NAME=VALUE: write for example --arg hidden_size=64")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _module(text: str, name: str) -> Any:
    # As with `python -m`, modules in the current directory can be imported.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with _errors_as_target_errors(text, f"importing {name} raised", passing=ModuleNotFoundError):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(missing + "."):
            raise TargetError(
                f"TARGET {text!r}: there is no module {missing!r} in {os.getcwd()} or on Python's path: "
                f"check the spelling, or run the command in the folder that contains it"
            ) from error
        raise TargetError(
            f"TARGET {text!r}: {name} imports {missing!r}, which is not installed{_at(error)}: install it"
        ) from error


def _attribute(text: str, module: Any, path: str) -> Any:
    value, so_far = module, module.__name__
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            near = difflib.get_close_matches(name, dir(value), n=1)
            hint = f": did you mean {near[0]!r}?" if near else ": check the spelling"
            raise TargetError(f"TARGET {text!r}: {so_far} has no {name!r}{hint}") from None
        so_far += f".{name}"
    return value


def _check_signature(text: str, constructor: Callable[..., Any], values: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(constructor)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(**values)
    except TypeError as error:
        takes = ", ".join(str(parameter) for parameter in signature.parameters.values()) or "nothing"
        raise TargetError(
            f"TARGET {text!r}: {error}; it takes ({takes}): pass arguments with --arg NAME=VALUE"
        ) from None


def _from_config(path: str, values: dict[str, Any]) -> Target:
    """The model that a Hugging Face config describes; only transformers' own code is run."""
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            fields = json.load(file)
    except OSError as error:
        raise TargetError(f"TARGET {path!r} cannot be read: {error.strerror}: {_FORMS}") from error
    except (ValueError, RecursionError) as error:
        raise TargetError(f"TARGET {path!r} is not JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise TargetError(f'TARGET {path!r} has no "model_type": a Hugging Face config.json has one, such as "llama"')

    import transformers

    kind = fields["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(transformers.CONFIG_MAPPING.keys()), n=1)
        hint = f": did you mean {near[0]!r}?" if near else ": code that comes with a config is not supported"
        raise TargetError(f"TARGET {path!r}: transformers {transformers.__version__} has no model_type {kind!r}{hint}")
    with _errors_as_target_errors(path, "transformers rejects this config:"):
        known = {**vars(transformers.CONFIG_MAPPING[kind]()), **fields}
        if unknown := values.keys() - known:  # transformers accepts any field, misspelt ones too
            raise TargetError(f"TARGET {path!r}: a {kind} config has no field {min(unknown)!r}: check the spelling")
        config = transformers.CONFIG_MAPPING[kind].from_dict({**fields, **values})
        architectures = config.architectures or [None]
        if not isinstance(architectures, list) or not isinstance(architectures[0], (str, type(None))):
            raise TargetError(f'TARGET {path!r}: "architectures" must be a list of names')
    architecture = architectures[0]
    if architecture is None:
        return Target(path, transformers.AutoModel.from_config, {"config": config})
    constructor = getattr(getattr(transformers, architecture, None), "_from_config", None)
    if constructor is None:
        raise TargetError(
            f"TARGET {path!r}: transformers {transformers.__version__} has no class {architecture!r} that makes a model"
        )
    # Like AutoModel.from_config, which makes weights in the config's dtype, unlike the class itself.
    return Target(path, constructor, {"config": config})


@contextmanager
def _errors_as_target_errors(text: str, context: str, passing: type[Exception] = FirstlossError) -> Iterator[None]:
    """Turn exceptions in the block, SystemExit included, into a TargetError with the line that raised."""
    try:
        yield
    except (FirstlossError, passing):
        raise
    except SystemExit as error:
        raise TargetError(f"TARGET {text!r}: {context} SystemExit: {error}, to end the process{_at(error)}") from error
    except Exception as error:
        raise TargetError(f"TARGET {text!r}: {context} {type(error).__name__}: {error}{_at(error)}") from error


@contextmanager
def exits_as_errors(caller: str) -> Iterator[None]:
    """Make `sys.exit(0)` in the user's code an error, as the command would otherwise end early with success."""
    try:
        yield
    except SystemExit as error:
        if error.code:
            raise
        raise TargetError(f"{caller} called sys.exit({error.code!r}){_at(error)}, before it was done") from error


def _at(error: BaseException) -> str:
    """` (file.py:12)`: the innermost line outside torch, Firstloss and the import machinery."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    package_folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = frame.filename
        if not (
            name.startswith(("<", package_folder))
            or f"{os.sep}torch{os.sep}" in name
            or f"{os.sep}importlib{os.sep}" in name
        ):
            return f" ({name}:{frame.lineno})"
    return ""
