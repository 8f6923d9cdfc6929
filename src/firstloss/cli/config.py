"""A training run as YAML: what `firstloss fit` and `validate` read, checked by the types of the Trainer's own classes.

jsonargparse makes the parser from signatures: of the Trainer here, and of whatever class or function a `class_path`
names. A name alone, in the file or as `--trainer.model=NAME`, is short for a `class_path` without `init_args`.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from jsonargparse import ArgumentParser, Namespace, get_loader, set_parsing_settings

import firstloss as fl
from firstloss.distributed import ClusterConfig
from firstloss.trainer import Checkpoint, Logging, MixedPrecision, Precision, Trainer, TrainingLoop
from firstloss.trainer.callback import Callback
from firstloss.trainer.randomness import seed_everything

from ..errors import ConfigError
from .config_errors import in_words, named

set_parsing_settings(instantiate_subclass_spec_in_any=False)  # what is of no declared type is left as it is written

Scheduler: TypeAlias = torch.optim.lr_scheduler.LRScheduler | fl.optim.lr_scheduler.Schedule

# What a `class_path` names, and where it is looked for if it is a class's name alone.
_CALLED = {
    "trainer.model": (),
    "trainer.optimizer": ("torch.optim", "firstloss.optim"),
    "trainer.schedulers": ("torch.optim.lr_scheduler", "firstloss.optim.lr_scheduler"),
    "train_dataloader": (),
    "val_dataloader": (),
}
# Of a function, the Trainer gives the first argument: the model, or the optimizer.
_GIVEN = {"trainer.model": 0, "trainer.optimizer": 1, "trainer.schedulers": 1}


class ConfiguredTrainer(Trainer):
    """The Trainer with the types that YAML can say: model, optimizer and schedulers are always callables here."""

    def __init__(
        self,
        model: Callable[[], torch.nn.Module],
        loop: TrainingLoop,
        optimizer: Callable[[Iterable], torch.optim.Optimizer] | None = None,
        schedulers: Callable[[torch.optim.Optimizer], Scheduler] | None = None,
        device: str = "XLA",
        artifact_dir: str | None = None,
        mesh: dict[str, int] | None = None,
        cluster_config: ClusterConfig | None = None,
        model_dir: str = "./model_dir",
        precision: Precision | MixedPrecision = Precision(),  # noqa: B008  (its keys are shown by --print_config; no run changes it)
        checkpoint: Checkpoint = Checkpoint(),  # noqa: B008
        logging: Logging = Logging(),  # noqa: B008
        callbacks: Sequence[Callback] | None = None,
        loggers: Sequence[Callback] | None = None,
        seed: int | None = 0,
    ) -> None:
        """As the Trainer.

        Args:
            model: a class with its arguments, or a function: it is called when the run begins.
            loop: how long to train.
            optimizer: an optimizer's class with its arguments, or a function `(model, ...) -> Optimizer`.
            schedulers: a scheduler's class with its arguments, or a function `(optimizer, ...) -> Scheduler`.
            device: "XLA", "CPU" or "GPU".
            artifact_dir: where compiled steps are kept for the next start; by default "artifacts" in `model_dir`.
            mesh: the devices to share the work, as {fsdp: 8}.
            cluster_config: the same in the references' words, and how many workers read data: {num_csx: 8,
                num_workers_per_csx: 2}.
            model_dir: the run folder.
            precision: the dtypes that a step computes in; `class_path: firstloss.trainer.MixedPrecision` for Model
                Zoo's arguments.
            checkpoint: when to save and what to keep.
            logging: how often to log.
            callbacks: your code.
            loggers: default a progress bar and JSON lines.
            seed: of torch, numpy and Python, before the loaders and the model are made.
        """
        super().__init__(
            backend=fl.backend(
                device,
                mesh=mesh,
                cluster_config=cluster_config,
                artifact_dir=artifact_dir or os.path.join(model_dir, "artifacts"),
            ),
            model_dir=model_dir,
            model=model,
            optimizer=_of_parameters(optimizer),
            schedulers=schedulers,
            precision=precision,
            loop=loop,
            checkpoint=checkpoint,
            logging=logging,
            callbacks=callbacks,
            loggers=loggers,
            seed=seed,
        )


def _of_parameters(optimizer: Any) -> Any:
    """A class takes the model's parameters; a function of the user's takes the model."""
    if isinstance(optimizer, functools.partial):
        return lambda model: optimizer(model.parameters())
    return optimizer


def parser(command: str, functions: dict[str, Any] | None = None) -> ArgumentParser:
    """The parser of the run's file and of `--trainer.loop.max_steps=50` and the like.

    Args:
        command: "fit" or "validate".
        functions: those that are named under the keys of `_GIVEN`: what the Trainer gives them is no key.
    """
    made = ArgumentParser(f"firstloss {command}", exit_on_error=False, allow_abbrev=False)
    made.add_argument("--config", action="config", help="the run's YAML file")
    given = {
        f"{key.removeprefix('trainer.')}.init_args.{name}"
        for key, function in (functions or {}).items()
        for name in list(inspect.signature(function).parameters)[: _GIVEN.get(key, 0)]
    }
    made.add_class_arguments(ConfiguredTrainer, "trainer", skip=given, fail_untyped=False)
    made.add_argument("--train_dataloader", type=Callable[[], Iterable] | None, help="a loader's class, or a function")
    made.add_argument("--val_dataloader", type=Callable[[], Iterable] | None, help="likewise, to validate on")
    made.add_argument(
        "--ckpt_path",
        type=str | None,
        default="last",
        help="last, best, a checkpoint of the run's, or weights from elsewhere; null: nothing is loaded",
    )
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
    where = file or "the arguments"
    made = parser(command)
    try:
        arguments = list(_with_class_paths(overrides))
        content = _content(file) if file else {}
        if content:
            arguments = ["--config", json.dumps(content), *arguments]
        made = parser(command, _functions(content, arguments))
        found = made.parse_args(arguments)
        return made, found
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{where}: {in_words(str(error), made, ConfiguredTrainer)}") from error


def read_model_zoo(file: str | None, overrides: Sequence[str]) -> Any:
    """The run of a file that has Model Zoo's layout; None for any other."""
    from . import modelzoo

    if file is None or not os.path.isfile(file):
        return None
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    with open(file, encoding="utf-8") as opened:
        try:
            content = get_loader("yaml")(opened.read())
        except Exception:  # told by `read`
            return None
    if not modelzoo.is_one(content):
        return None
    try:
        return modelzoo.read(content, overrides)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def instantiate(command: str, made: ArgumentParser, config: Namespace) -> Namespace:
    """The objects that a configuration describes. The model is not among them yet: the Trainer calls for it."""
    config = config.clone()
    for key, count in _GIVEN.items():
        spec = config[key]
        if isinstance(spec, Namespace) and not isinstance(named(spec.class_path), type):
            config[key] = _called_later(spec, count)
    loop = config.trainer.loop
    if command == "validate" and loop.max_steps is None and loop.max_epochs is None:
        loop.max_steps = 1  # a run that only validates has no end to be named
    loop.validation.metrics = {name: _metric(name, spec) for name, spec in loop.validation.metrics.items()}
    if config.trainer.seed is not None:
        seed_everything(config.trainer.seed)  # what a loader's function draws is the same each time, too
    try:
        given = made.instantiate(config)
    except (ValueError, TypeError) as error:
        if isinstance(error, fl.errors.FirstlossError):
            raise
        raise ConfigError(in_words(str(error), made, ConfiguredTrainer)) from error
    for key in ("train_dataloader", "val_dataloader"):
        if callable(given[key]) and not isinstance(given[key], Iterable):
            given[key] = given[key]()
    return given


def _metric(name: str, spec: Any) -> Any:
    """A metric has no class of ours that jsonargparse could know: it is made here."""
    at = f"trainer.loop.validation.metrics.{name}"
    if not isinstance(spec, (dict, Namespace)) or "class_path" not in spec:
        raise ConfigError(f"{at} is {spec!r}. Write {{class_path: torchmetrics.MeanMetric, init_args: {{...}}}}.")
    metric = named(str(spec["class_path"]), at)
    try:
        return metric(**dict(spec.get("init_args") or {}))
    except Exception as error:
        raise ConfigError(f"{at}: {spec['class_path']}: {error}") from error


def _called_later(spec: Namespace, count: int) -> Callable[..., Any]:
    """jsonargparse would call a function at once: the model would be made eagerly, the optimizer without a model."""
    function = named(spec.class_path)
    alone = ArgumentParser()
    alone.add_function_arguments(function, "given", skip={count} if count else None, fail_untyped=False)

    def later(*first: Any) -> Any:
        init_args = spec.get("init_args") or Namespace()
        return function(*first, **vars(alone.instantiate(Namespace(given=init_args)).given))

    later.__qualname__ = spec.class_path
    return later


def _content(file: str) -> dict[str, Any]:
    """What is in the file, names written out as class paths."""
    with open(file, encoding="utf-8") as opened:
        try:
            content = get_loader("yaml")(opened.read())
        except Exception as error:
            raise ConfigError(f"this is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError('this is no run: it should hold keys, the first of which is "trainer:".')
    for key, places in _CALLED.items():
        *outer, last = key.split(".")
        inner = content.get(outer[0]) if outer else content
        if isinstance(inner, dict) and isinstance(inner.get(last), str):
            inner[last] = {"class_path": _written_out(inner[last], places)}
        elif isinstance(inner, dict) and isinstance(inner.get(last), dict) and "class_path" in inner[last]:
            inner[last]["class_path"] = _written_out(inner[last]["class_path"], places)
    return content


def _with_class_paths(overrides: Sequence[str]) -> Iterator[str]:
    """`--trainer.model=NAME` as `--trainer.model.class_path=NAME`, so that its arguments can be overridden as well."""
    waiting = list(overrides)
    while waiting:
        argument = waiting.pop(0)
        option, equals, value = argument.partition("=")
        key = option.removeprefix("--").removesuffix(".class_path")
        if key not in _CALLED or not option.startswith("--"):
            yield argument
            continue
        if not equals:
            value = waiting.pop(0) if waiting else ""
        spec = get_loader("yaml")(value) if value.startswith("{") else {"class_path": value}
        if value in ("null", "") or not isinstance(spec, dict) or "class_path" not in spec:
            yield f"--{key}={value}"
            continue
        yield f"--{key}.class_path={_written_out(spec['class_path'], _CALLED[key])}"
        for name, argument in (spec.get("init_args") or {}).items():
            yield f"--{key}.init_args.{name}={json.dumps(argument)}"


def _written_out(name: Any, places: Sequence[str]) -> Any:
    """A class's name with its module, where it is one that can be told: AdamW is torch.optim.AdamW."""
    for place in places if isinstance(name, str) and "." not in name else ():
        if isinstance(getattr(sys.modules.get(place), name, None), type):
            return f"{place}.{name}"
    return name


def _functions(content: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The functions, not classes, that are named under the keys of `_GIVEN`; an override goes before the file."""
    found = {}
    for key in _GIVEN:
        spec = content.get("trainer", {}) if isinstance(content.get("trainer", {}), dict) else {}
        spec = spec.get(key.removeprefix("trainer."))
        paths = [spec["class_path"]] if isinstance(spec, dict) and "class_path" in spec else []
        prefix = f"--{key}.class_path="
        paths += [argument.removeprefix(prefix) for argument in arguments if argument.startswith(prefix)]
        if paths and isinstance(paths[-1], str) and "." in paths[-1]:
            thing = named(paths[-1], key)
            if callable(thing) and not isinstance(thing, type):
                found[key] = thing
    return found
