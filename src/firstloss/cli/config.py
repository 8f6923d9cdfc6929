"""A training run as YAML: what `firstloss fit` and `validate` read, checked by the types of the Trainer's own classes.

jsonargparse makes the parser from signatures: of the Trainer here, and of whatever class a `class_path` names.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

import firstloss as fl
from firstloss.trainer import Trainer, TrainingLoop
from firstloss.trainer.callback import Callback

from ..errors import ConfigError

KEYS = ("trainer", "train_dataloader", "val_dataloader", "ckpt_path")


class ConfiguredTrainer(Trainer):
    """The Trainer with the types that YAML can say: model, optimizer and schedulers are always callables here."""

    def __init__(
        self,
        model: Callable[[], torch.nn.Module],
        optimizer: Callable[[Iterable], torch.optim.Optimizer] | None = None,
        schedulers: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
        | Callable[[torch.optim.Optimizer], fl.optim.lr_scheduler.Schedule]
        | None = None,
        loop: TrainingLoop | None = None,
        device: str = "XLA",
        artifact_dir: str = "./artifacts",
        mesh: dict[str, int] | None = None,
        callbacks: Sequence[Callback] | None = None,
        loggers: Sequence[Callback] | None = None,
        **options: Any,
    ) -> None:
        """As the Trainer.

        Args:
            model: a class with its arguments, or a function without: it is called when the run begins.
            optimizer: an optimizer's class with its arguments, or a function `Module -> Optimizer`.
            schedulers: a scheduler's class with its arguments, or a function `Optimizer -> Scheduler`.
            loop: how long to train.
            device: "XLA", "CPU" or "GPU".
            artifact_dir: where compiled steps are kept for the next start.
            mesh: the devices to share the work, as {fsdp: 8}.
            callbacks: code of yours.
            loggers: default a progress bar and JSON lines.
        """
        super().__init__(
            backend=fl.backend(device, mesh=mesh, artifact_dir=artifact_dir),
            model=model,
            optimizer=_of_parameters(optimizer),
            schedulers=schedulers,
            loop=loop,
            callbacks=callbacks,
            loggers=loggers,
            **options,
        )


def _of_parameters(optimizer: Any) -> Any:
    """A class takes the model's parameters; a function of the user's takes the model."""
    if isinstance(optimizer, functools.partial):
        return lambda model: optimizer(model.parameters())
    return optimizer


def parser(command: str) -> ArgumentParser:
    """The parser of the run's file and of `--trainer.loop.max_steps=50` and the like."""
    made = ArgumentParser(prog=f"firstloss {command}", exit_on_error=False, description="The keys of a run's file.")
    made.add_argument("--config", action="config", help="the run's YAML file")
    made.add_class_arguments(ConfiguredTrainer, "trainer", skip={"backend"})
    made.add_argument("--train_dataloader", type=Callable[[], Iterable] | None, help="a loader's class, or a function")
    made.add_argument("--val_dataloader", type=Callable[[], Iterable] | None, help="likewise, to validate on")
    made.add_argument("--ckpt_path", type=str | None, help="weights to start from, or to validate")
    return made


def read(command: str, file: str | None, overrides: Sequence[str]) -> tuple[ArgumentParser, Namespace]:
    """The checked configuration; what is named in it can be imported from the folder that one works in.

    Raises:
        ConfigError: in one line, an unknown key with the nearest name that exists.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if file is not None and not os.path.isfile(file):
        raise ConfigError(f"{file}: there is no such file.")
    made = parser(command)
    try:
        return made, made.parse_args([*(["--config", file] if file else []), *overrides])
    except Exception as error:
        options = [name for action in made._actions for name in action.option_strings]
        raise ConfigError(f"{file or 'the arguments'}: {in_words(str(error), options)}") from error


def instantiate(made: ArgumentParser, config: Namespace) -> Namespace:
    """The objects that a configuration describes. The model is not among them yet: the Trainer calls for it."""
    model = config.trainer.model
    if isinstance(model, Namespace) and not isinstance(_named(model.class_path), type):
        config = config.clone()
        config.trainer.model = _call_later(model)
    given = made.instantiate(config)
    for key in ("train_dataloader", "val_dataloader"):
        if callable(given[key]) and not isinstance(given[key], Iterable):
            given[key] = given[key]()
    return given


def _call_later(model: Namespace) -> Callable[[], torch.nn.Module]:
    """jsonargparse would call a function that has arguments at once, and the model would be made eagerly."""
    alone = ArgumentParser()
    alone.add_argument("--model", type=Callable[[], torch.nn.Module])
    return lambda: alone.instantiate(Namespace(model=model)).model


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def in_words(message: str, options: Sequence[str] = ()) -> str:
    """jsonargparse's report in a line: where, what, and the nearest name."""
    stray = re.search(r"unrecognized arguments: (--[\w.]+)", message)
    if stray:
        near = difflib.get_close_matches(stray[1], options, n=1)
        return f"there is no {stray[1]}: " + (f"did you mean {near[0]}?" if near else "see --print_config.")
    unknown = re.search(r"[Oo]ption '([\w.]+)' is not accepted|does not accept option '([\w.]+)'", message)
    if unknown:
        name = unknown[1] or unknown[2]
        owner, names = _owner(message, message.index(unknown[0]))
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}."
        return f"{owner} has no {name!r}: {hint}"
    function = re.search(r"Expected '([\w.]+)' to be a function that returns <class '(\w+)'>", message)
    if function:
        return f"{function[1]} does not say what it returns. Write -> {function[2]} in its definition."
    keys = re.findall(r'Parser key "([\w.]+)"', message)
    reason = re.search(r"expects a function or a callable class: (.*?)\. Got value", message)
    if keys and reason:
        return f"{keys[0]}: {reason[1]}."
    expected = re.findall(r"Expected a <class '([\w.]+)'>", message)
    given = re.findall(r"Given value: (.*)", message)
    if keys and expected and given:
        kinds = " or ".join(dict.fromkeys(kind for kind in expected if kind != "NoneType"))
        return f"{'.'.join(keys)} is {given[0].strip()!r}, where {kinds or 'nothing'} was expected."
    required = re.search(r'Key "([\w.]+)" is required', message)
    if required:
        return f"{required[1]} is missing."
    return " ".join(message.split())


def _owner(message: str, at: int) -> tuple[str, list[str]]:
    """Who does not know the name, and the names that it knows."""
    before = re.findall(r"class_path '([\w.]+)'", message[:at])
    after = re.findall(r"class_path='([\w.]+)'", message[at:])
    path = before[-1] if before else after[0] if after else None
    if path is not None:
        return path.rpartition(".")[2], list(inspect.signature(_named(path)).parameters)
    if re.search(r"Group 'trainer'", message):
        own = inspect.signature(ConfiguredTrainer).parameters.keys() | inspect.signature(Trainer).parameters.keys()
        return "trainer", sorted(own - {"options", "backend"})
    return "the run", list(KEYS)
