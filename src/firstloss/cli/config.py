"""The run file: the YAML that `firstloss fit` and `validate` read, checked against the types of the Trainer's classes.

jsonargparse builds the parser from signatures: the Trainer's, and those of the classes and functions that a
`class_path` names. A plain name, in the file or as `--trainer.model=NAME`, is short for a `class_path` without
`init_args`.
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
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

import firstloss as fl
from firstloss.distributed import ClusterConfig
from firstloss.trainer import Checkpoint, Logging, MixedPrecision, Precision, Trainer, TrainingLoop
from firstloss.trainer.callback import Callback
from firstloss.trainer.randomness import seed_everything

from ..errors import ConfigError
from . import yaml_text
from .config_errors import named, shortened

set_parsing_settings(instantiate_subclass_spec_in_any=False)  # leave values without a declared type as they are

Scheduler: TypeAlias = torch.optim.lr_scheduler.LRScheduler | fl.optim.lr_scheduler.Schedule

# Keys that take a `class_path`, and the modules in which a class's name alone is looked up.
_CALLED = {
    "trainer.model": (),
    "trainer.optimizer": ("torch.optim", "firstloss.optim"),
    "trainer.schedulers": ("torch.optim.lr_scheduler", "firstloss.optim.lr_scheduler"),
    "train_dataloader": (),
    "val_dataloader": (),
}
# How many leading arguments the Trainer passes to a function under these keys: the model, or the optimizer.
_GIVEN = {"trainer.model": 0, "trainer.optimizer": 1, "trainer.schedulers": 1}


class ConfiguredTrainer(Trainer):
    """The Trainer with types that YAML can express: model, optimizer and schedulers are always callables."""

    def __init__(
        self,
        model: Callable[[], torch.nn.Module],
        loop: TrainingLoop,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        schedulers: Callable[[torch.optim.Optimizer], Scheduler] | None = None,
        device: str = "XLA",
        artifact_dir: str | None = None,
        mesh: dict[str, int] | None = None,
        same_run: int | None = None,
        cluster_config: ClusterConfig | None = None,
        model_dir: str = "./model_dir",
        precision: Precision | MixedPrecision = Precision(),  # noqa: B008  (for --print_config; never modified)
        checkpoint: Checkpoint = Checkpoint(),  # noqa: B008
        logging: Logging = Logging(),  # noqa: B008
        callbacks: Sequence[Callback] | None = None,
        loggers: Sequence[Callback] | None = None,
        seed: int | None = 0,
    ) -> None:
        """Construct the Trainer and its backend.

        Args:
            model: a class with its arguments, or a function; called when the run begins.
            loop: how long to train.
            optimizer: an optimizer's class with its arguments, or a function `(model, ...) -> Optimizer`.
            schedulers: a scheduler's class with its arguments, or a function `(optimizer, ...) -> Scheduler`.
            device: "XLA", "CPU" or "GPU".
            artifact_dir: where compiled steps are cached; by default "artifacts" in `model_dir`.
            mesh: the device mesh, for example {fsdp: 8}.
            same_run: the number of logical shards by which steps are computed, for the same run on any mesh.
            cluster_config: data parallelism and loader workers under the references' names: {num_csx: 8,
                num_workers_per_csx: 2}.
            model_dir: the run folder.
            precision: mixed precision; `class_path: firstloss.trainer.MixedPrecision` takes Model Zoo's arguments.
            checkpoint: when to save and what to keep.
            logging: how often to log.
            callbacks: your code that runs at the stages of the run.
            loggers: by default a progress display and JSON lines.
            seed: seed of torch, numpy and Python, set before the loaders and the model are made.
        """
        super().__init__(
            backend=fl.backend(
                device,
                mesh=mesh,
                same_run=same_run,
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
    """Adapt an optimizer class, which takes parameters, to the Trainer, which passes the model."""
    if isinstance(optimizer, functools.partial):
        return lambda model: optimizer(model.parameters())
    return optimizer


def parser(command: str, functions: dict[str, Any] | None = None) -> ArgumentParser:
    """The parser of the run file and of overrides such as `--trainer.loop.max_steps=50`.

    Args:
        command: "fit" or "validate".
        functions: functions under the keys of `_GIVEN`; arguments that the Trainer passes to them are not keys.
    """
    command_parser = ArgumentParser(f"firstloss {command}", exit_on_error=False, allow_abbrev=False)
    command_parser.add_argument("--config", action="config", help="the run's YAML file")
    given = {
        f"{key.removeprefix('trainer.')}.init_args.{name}"
        for key, function in (functions or {}).items()
        for name in list(inspect.signature(function).parameters)[: _GIVEN.get(key, 0)]
    }
    command_parser.add_class_arguments(ConfiguredTrainer, "trainer", skip=given, fail_untyped=False)
    command_parser.add_argument(
        "--train_dataloader", type=Callable[[], Iterable] | None, help="a loader's class, or a function"
    )
    command_parser.add_argument("--val_dataloader", type=Callable[[], Iterable] | None, help="likewise, for validation")
    command_parser.add_argument(
        "--ckpt_path",
        type=str | None,
        default="last",
        help="last, best, a checkpoint of this run, or weights from elsewhere; null: load nothing",
    )
    return command_parser


def read(command: str, file: str | None, overrides: Sequence[str]) -> tuple[ArgumentParser, Namespace]:
    """Read and check the configuration. Names in it are imported with the current directory on `sys.path`.

    Raises:
        ConfigError: a one-line error; for an unknown key it suggests the nearest name.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if file is not None and not os.path.isfile(file):
        raise ConfigError(f"{file}: no such file.")
    where = file or "the arguments"
    command_parser = parser(command)
    try:
        arguments = list(_with_class_paths(overrides))
        content = _content(file) if file else {}
        if content:
            arguments = ["--config", json.dumps(content), *arguments]
        command_parser = parser(command, _functions(content, arguments))
        config = command_parser.parse_args(arguments)
        return command_parser, config
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{where}: {shortened(str(error), command_parser, ConfiguredTrainer)}") from error


def read_model_zoo(file: str | None, overrides: Sequence[str]) -> Iterator[Any] | None:
    """The runs described by a file in Model Zoo's layout, each constructed when the one before has ended; None for
    other files."""
    from . import modelzoo

    if file is None or not os.path.isfile(file):
        return None
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        content = yaml_text.load(_text_of(file))
    except ConfigError:  # `read` reports it
        return None
    found = modelzoo.phases(content)
    return (_phase(file, phase, overrides) for phase in found) if found else None


def _phase(file: str, phase: dict[str, Any], overrides: Sequence[str]) -> Any:
    from . import modelzoo

    try:
        return modelzoo.read(phase, overrides)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError, OSError) as error:
        # the file has another structure than Model Zoo's, or a class of the user's rejects its arguments
        raise ConfigError(f"{file}: {type(error).__name__}: {error}") from error


def instantiate(command: str, command_parser: ArgumentParser, config: Namespace) -> Namespace:
    """Create the objects that a configuration describes, except the model, which the Trainer creates."""
    config = config.clone()
    for key, count in _GIVEN.items():
        spec = config[key]
        if isinstance(spec, Namespace) and not isinstance(named(spec.class_path), type):
            config[key] = _called_later(spec, count)
    loop = config.trainer.loop
    if command == "validate" and loop.max_steps is None and loop.max_epochs is None:
        loop.max_steps = 1  # unused, but TrainingLoop requires a limit
    loop.validation.metrics = {name: _metric(name, spec) for name, spec in loop.validation.metrics.items()}
    if config.trainer.seed is not None:
        seed_everything(config.trainer.seed)  # for loaders that draw random data
    try:
        given = command_parser.instantiate(config)
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, fl.errors.FirstlossError):
            raise
        raise ConfigError(shortened(str(error), command_parser, ConfiguredTrainer)) from error
    for key in ("train_dataloader", "val_dataloader"):
        if callable(given[key]) and not isinstance(given[key], Iterable):
            given[key] = given[key]()
    return given


def _metric(name: str, spec: Any) -> Any:
    """Create a metric; metrics have no common base class by which jsonargparse could."""
    where = f"trainer.loop.validation.metrics.{name}"
    if not isinstance(spec, (dict, Namespace)) or "class_path" not in spec:
        raise ConfigError(f"{where} is {spec!r}. Write {{class_path: torchmetrics.MeanMetric, init_args: {{...}}}}.")
    metric = named(str(spec["class_path"]), where)
    try:
        return metric(**dict(spec.get("init_args") or {}))
    except Exception as error:
        raise ConfigError(f"{where}: {spec['class_path']}: {error}") from error


def _called_later(spec: Namespace, count: int) -> Callable[..., Any]:
    """Defer the call of a function, which jsonargparse would call at once, without the model that it takes."""
    function = named(spec.class_path)
    alone = ArgumentParser()
    alone.add_function_arguments(function, "given", skip={count} if count else None, fail_untyped=False)

    def later(*first: Any) -> Any:
        init_args = spec.get("init_args") or Namespace()
        return function(*first, **vars(alone.instantiate(Namespace(given=init_args)).given))

    later.__qualname__ = spec.class_path
    return later


def _text_of(file: str) -> str:
    with open(file, "rb") as opened:
        content = opened.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"not valid YAML: {error}") from error


def _content(file: str) -> dict[str, Any]:
    """The file's content, with names expanded to class paths."""
    content = yaml_text.load(_text_of(file))
    if not isinstance(content, dict):
        raise ConfigError('not a run file: it must be a mapping with the key "trainer:".')
    for key, modules in _CALLED.items():
        *outer, last = key.split(".")
        inner = content.get(outer[0]) if outer else content
        if isinstance(inner, dict) and isinstance(inner.get(last), str):
            inner[last] = {"class_path": _expanded(inner[last], modules)}
        elif isinstance(inner, dict) and isinstance(inner.get(last), dict) and "class_path" in inner[last]:
            inner[last]["class_path"] = _expanded(inner[last]["class_path"], modules)
    return content


def _with_class_paths(overrides: Sequence[str]) -> Iterator[str]:
    """Rewrite `--trainer.model=NAME` to `--trainer.model.class_path=NAME`, so that its arguments can be overridden."""
    remaining = list(overrides)
    while remaining:
        argument = remaining.pop(0)
        option, equals, value = argument.partition("=")
        key = option.removeprefix("--").removesuffix(".class_path")
        if key not in _CALLED or not option.startswith("--"):
            yield argument
            continue
        if not equals:
            value = remaining.pop(0) if remaining else ""
        spec = yaml_text.load(value) if value.startswith("{") else {"class_path": value}
        if value in ("null", "") or not isinstance(spec, dict) or "class_path" not in spec:
            yield f"--{key}={value}"
            continue
        yield f"--{key}.class_path={_expanded(spec['class_path'], _CALLED[key])}"
        for name, argument in (spec.get("init_args") or {}).items():
            yield f"--{key}.init_args.{name}={json.dumps(argument)}"


def _expanded(name: Any, modules: Sequence[str]) -> Any:
    """Prefix a class's name with its module if it is in one of `modules`: AdamW becomes torch.optim.AdamW."""
    for module in modules if isinstance(name, str) and "." not in name else ():
        if isinstance(getattr(sys.modules.get(module), name, None), type):
            return f"{module}.{name}"
    return name


def _functions(content: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The functions (not classes) under the keys of `_GIVEN`; overrides take precedence over the file."""
    functions = {}
    for key in _GIVEN:
        spec = content.get("trainer", {}) if isinstance(content.get("trainer", {}), dict) else {}
        spec = spec.get(key.removeprefix("trainer."))
        paths = [spec["class_path"]] if isinstance(spec, dict) and "class_path" in spec else []
        prefix = f"--{key}.class_path="
        paths += [argument.removeprefix(prefix) for argument in arguments if argument.startswith(prefix)]
        if paths and isinstance(paths[-1], str) and "." in paths[-1]:
            target = named(paths[-1], key)
            if callable(target) and not isinstance(target, type):
                functions[key] = target
    return functions
