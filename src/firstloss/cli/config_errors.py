"""One-line errors in a run file: where, what, and the nearest existing name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import typing
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

from ..compat.python_names import options_of
from ..errors import ConfigError

KEYS = ("trainer", "train_dataloader", "val_dataloader", "ckpt_path")


def named(path: str, key: str = "") -> Any:
    """Import the object that a `class_path` names.

    Raises:
        ConfigError: if the module or the name does not exist; suggests the nearest name.
    """
    where = f"{key}: " if key else ""
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"{where}{path!r} is a name without a module. Write package.module.{path}.")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise ConfigError(f"{where}there is no module {error.name!r} (in {path!r}).") from error
        raise ConfigError(f"{where}{module} cannot be imported: {error}.") from error
    except Exception as error:
        raise ConfigError(f"{where}{module} cannot be imported: {type(error).__name__}: {error}.") from error
    if not hasattr(imported, name):
        raise ConfigError(f"{where}{module} has no {name!r}{_nearest(name, _public(imported))}")
    return getattr(imported, name)


def shortened(message: str, parser: Any, trainer: type) -> str:
    """Shorten jsonargparse's report to one line that says what to change."""
    for rule in (_unknown_option, _unknown, _wrong_class, _refused, _wrong_type):
        try:
            shorter = rule(message, parser, trainer)
        except (TypeError, ValueError):  # a builtin class without a signature, for example: the message stays as it is
            continue
        if shorter:
            return shorter
    alone = re.search(r"Expected a dot import path string: (\w+)", message)
    if alone:
        return f"{_key(message)}: {alone[1]!r} is a name without a module. Write package.module.{alone[1]}."
    required = re.search(r'Key "([\w.]+)" is required|arguments are required: ([\w.]+)', message)
    if required:
        return f"{required[1] or required[2]} is missing."
    return " ".join(message.split())


def _unknown_option(message: str, parser: Any, trainer: type) -> str:
    option = re.search(r"unrecognized arguments: (--[\w.]+)", message)
    if not option:
        return ""
    options = [name for action in options_of(parser) for name in action.option_strings]
    near = difflib.get_close_matches(option[1], options, n=1)
    return f"there is no {option[1]}: " + (f"did you mean {near[0]}?" if near else "see --print_config.")


def _unknown(message: str, parser: Any, trainer: type) -> str:
    unknown = re.search(r"[Oo]ption '([\w.]+)' is not accepted|does not accept option '([\w.]+)'", message)
    if not unknown:
        return ""
    name, at = unknown[1] or unknown[2], message.index(unknown[0])
    before = re.findall(r"class_path '([\w.]+)'", message[:at])
    after = re.findall(r"class_path='([\w.]+)'", message[at:])
    if before or after:
        path = before[-1] if before else after[0]
        return f"{path.rpartition('.')[2]} has no {name!r}{_nearest(name, inspect.signature(named(path)).parameters)}"
    group = re.search(r"Group '([\w.]+)'", message)
    if group is not None:
        return _unknown_key(group[1], name, trainer)
    if name.split(".")[0] in inspect.signature(trainer).parameters:
        return f"the run has no {name!r}: write it under trainer, as trainer.{name}."
    return f"the run has no {name!r}{_nearest(name, KEYS)}"


def _unknown_key(owner: str, name: str, trainer: type) -> str:
    """Find the part of a key such as "loop.validation.max_batch" that does not exist."""
    kind: Any = trainer
    for part in [*owner.split(".")[1:], *name.split(".")]:
        names = [key for key in inspect.signature(kind).parameters if key != "self"]
        if part not in names:
            return f"{owner} has no {part!r}{_nearest(part, sorted(names))}"
        kind = typing.get_type_hints(kind if is_dataclass(kind) else kind.__init__)[part]
        owner = owner if owner.endswith(f".{part}") else f"{owner}.{part}"
    return f"{owner} is not a key."


def _wrong_class(message: str, parser: Any, trainer: type) -> str:
    """A class_path that cannot be imported, or is not of the expected class."""
    key = _key(message)
    path = re.search(r"'?class_path'?(?:: |=| )'([\w.]+)'", message)
    kind = re.search(r"Expected '([\w.]+)' to be a subclass of (?:<class '([\w.]+)'>|([\w.]+))", message)
    kind = kind or re.search(r"Import path ([\w.]*) ?does not correspond to a subclass of ([\w.]+)", message)
    if path is not None:
        try:
            named(path[1], key)
        except ConfigError as error:
            return str(error)
    if kind is not None:
        given = kind[1] or re.findall(r"Given value: (.*)", message)[0]
        base = next(name for name in kind.groups()[1:] if name).rpartition(".")[2]
        return f"{key}: {given} is not a subclass of {base}."
    reason = re.search(r"expects a function or a callable class: (.*?)\. Got value", message)
    return f"{key}: {reason[1]}." if key and reason else ""


def _refused(message: str, parser: Any, trainer: type) -> str:
    """The error with which one of our classes refused its arguments."""
    refused = re.search(r"- ((?:\w+: \w+=|TrainingLoop ).*)", message)
    return refused[1] if refused else ""


def _wrong_type(message: str, parser: Any, trainer: type) -> str:
    key = _key(message)
    expected = re.findall(r"Expected an? <class '([\w.]+)'>", message)
    given = re.findall(r"(?:Given|Got) value: (.*)", message)
    if not (key and expected and given):
        return ""
    kinds = " or ".join(dict.fromkeys(kind for kind in expected if kind != "NoneType"))
    value = given[0].strip()
    nested = re.fullmatch(r"NestedArg\(key='([\w.]+)', val='?(.*?)'?\)", value)
    if nested:
        key, value = f"{key}.{nested[1]}", nested[2]
    space = ' (in YAML a space follows each ":")' if re.search(r"^\{.*\w:\S", value) else ""
    return f"{key} is {value!r}, but {kinds or 'nothing'} was expected{space}."


def _key(message: str) -> str:
    return ".".join(re.findall(r'Parser key "([\w.]+)"', message))


def _nearest(name: str, names: Iterable[str]) -> str:
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": there are {', '.join(names)}." if 0 < len(names) <= 20 else "."


def _public(module: Any) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]
