"""Run files in the layout of Model Zoo's Trainer: `trainer: {init: ..., fit: ..., validate: ..., validate_all: ...}`,
or a list of such mappings, which are phases.

Names refer to those in `firstloss.trainer`, `firstloss.cstorch.optim` and its schedulers. A model's `name` and a
loader's `data_processor` are importable, as "package.module.Class": there is no registry of models.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import firstloss as fl
from firstloss.trainer import Checkpoint, Logging, MixedPrecision, Trainer, TrainingLoop, callbacks, loggers

from ..cstorch import optim
from ..errors import ConfigError
from ..no_effect import say_no_effect
from . import yaml_text
from .config_errors import named

_UNSUPPORTED = {
    "sparsity": "trains sparse weights on Cerebras' hardware",
}
# What is accepted, and has no effect here.
_FLAGS = ("GlobalFlags", "ScopedTrainFlags", "ScopedValidateFlags", "DebugArgsPath")
_NO_EFFECT = ("autorestart",)
SETTINGS = {"loop": TrainingLoop, "checkpoint": Checkpoint, "logging": Logging, "precision": MixedPrecision}
KEYS = (
    "backend",
    "device",
    "model_dir",
    "model",
    "optimizer",
    "schedulers",
    "callbacks",
    "loggers",
    "seed",
    *SETTINGS,
)


class ModelZooRun(NamedTuple):
    """What a file describes: the Trainer, and the arguments of each of "fit", "validate" and "validate_all"."""

    trainer: Trainer
    calls: dict[str, dict[str, Any]]


def phases(content: Any) -> list[dict[str, Any]]:
    """The phases of a file in Model Zoo's layout, which run one after another: one, or those in a list. Empty for other
    files."""
    trainer = content.get("trainer") if isinstance(content, Mapping) else None
    if isinstance(trainer, list):
        return [phase for one in trainer for phase in phases(one)] if all(map(phases, trainer)) else []
    return [dict(content)] if isinstance(trainer, Mapping) and "init" in trainer else []


def read(content: dict[str, Any], overrides: Sequence[str] = ()) -> ModelZooRun:
    """Construct the run that a phase describes.

    Args:
        overrides: options such as `--trainer.init.loop.max_steps=50`.

    Raises:
        ConfigError: a one-line error that names the key.
    """
    for override in overrides:
        key, equals, value = override.removeprefix("--").partition("=")
        if not equals or not key.startswith("trainer."):
            raise ConfigError(f"{override!r}: write overrides like --trainer.init.loop.max_steps=50.")
        node: Any = content
        *path, last = key.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = yaml_text.load(value)
    trainer = content["trainer"]
    _check("trainer", trainer, ("init", "fit", "validate", "validate_all"))
    init = trainer["init"]
    _check("trainer.init", init, (*KEYS, *_NO_EFFECT))
    for key in _NO_EFFECT:
        if key in init:
            say_no_effect(f"trainer.init.{key}")
    arguments: dict[str, Any] = {key: init[key] for key in ("model_dir", "seed") if key in init}
    arguments["backend"] = _backend(init)
    arguments["model"] = _model(init.get("model"))
    if init.get("optimizer") is not None:
        arguments["optimizer"] = _optimizer(init["optimizer"])
    if init.get("schedulers") is not None:
        arguments["schedulers"] = lambda optimizer: schedulers(optimizer, init["schedulers"])
    for key, kind in SETTINGS.items():
        if init.get(key) is not None:
            if key == "checkpoint" and isinstance(init[key], Mapping) and init[key].get("steps") == 0:
                init[key] = {**init[key], "steps": None}  # Model Zoo's 0: only at the end
            arguments[key] = _called(f"trainer.init.{key}", kind, init[key])
    for key, module in (("callbacks", callbacks), ("loggers", loggers)):
        if init.get(key) is not None:
            made = [_one(f"trainer.init.{key}", item, module) for item in init[key]]
            arguments[key] = [one for one in made if one is not None]
    if arguments.get("seed") is not None:
        from firstloss.trainer.randomness import seed_everything

        seed_everything(arguments["seed"])  # for loaders that draw random data
    calls = {}
    for call in ("fit", "validate", "validate_all"):
        if trainer.get(call) is not None:
            at = f"trainer.{call}"
            _check(at, trainer[call], inspect.signature(getattr(Trainer, call)).parameters)
            given = {}
            for key, value in trainer[call].items():
                is_loader = key.endswith(("dataloader", "dataloaders"))
                given[key] = _loaders(f"{at}.{key}", value) if is_loader else value
            calls[call] = given
    return ModelZooRun(Trainer(**arguments), calls)


def schedulers(optimizer: Any, specs: Any) -> list[Any]:
    """Create an optimizer's schedules, each given as {name: arguments}. SequentialLR's milestones default to where its
    parts end."""
    return [_schedule(optimizer, spec) for spec in (specs if isinstance(specs, list) else [specs])]


def _schedule(optimizer: Any, spec: Any) -> Any:
    name, arguments = _named_one("trainer.init.schedulers", spec)
    kind = getattr(optim.lr_scheduler, name, None) or getattr(optim.weight_decay_scheduler, name, None)
    if kind is None:
        known = [*optim.lr_scheduler.__all__, *optim.weight_decay_scheduler.__all__]
        raise ConfigError(f"trainer.init.schedulers: there is no {name!r}.{_near(name, known)}")
    arguments = dict(arguments)
    if "schedulers" in arguments:
        parts = [_schedule(optimizer, part) for part in arguments["schedulers"]]
        if name.startswith("Sequential") and arguments.get("milestones") is None:
            lengths = [getattr(part, "total_iters", None) for part in parts[:-1]]
            if None in lengths:
                raise ConfigError(f"trainer.init.schedulers: {name} needs milestones, or total_iters of each part.")
            arguments["milestones"] = list(itertools.accumulate(lengths))
        arguments["schedulers"] = parts
    given = () if name.startswith("Chained") else (optimizer,)
    if name.startswith("ScalePerParam"):
        if not any({"adjust_learning_rate", "adjust_val"} & group.keys() for group in optimizer.param_groups):
            raise ConfigError(
                f"trainer.init.schedulers: {name} scales groups of parameters that have a factor, and groups made from "
                "a file have none. Make the optimizer in Python, or leave this schedule out."
            )
        arguments["scheduler"] = _schedule(optimizer, arguments["scheduler"])
    return _called(f"trainer.init.schedulers.{name}", kind, arguments, *given)


def _backend(init: Mapping[str, Any]) -> Any:
    spec = init.get("backend")
    if spec is None:
        spec = {"backend_type": init.get("device", "CSX")}
    elif init.get("device") is not None:
        raise ConfigError("trainer.init: backend and device are two names of one setting. Leave one of them out.")
    spec = {"backend_type": spec} if isinstance(spec, str) else dict(spec)
    name = spec.pop("backend_type", "CSX")
    if spec.get("cluster_config") is not None:
        at = "trainer.init.backend.cluster_config"
        spec["cluster_config"] = _called(at, fl.distributed.ClusterConfig, spec["cluster_config"])
    spec.setdefault("artifact_dir", f"{init.get('model_dir', './model_dir')}/artifacts")
    return _called("trainer.init.backend", fl.backend, spec, name)


def _model(spec: Any) -> Callable[[], Any]:
    spec = {"name": spec} if isinstance(spec, str) else spec
    if not isinstance(spec, Mapping) or "name" not in spec:
        raise ConfigError(
            "trainer.init.model: write {name: package.module.Class, ...}; the other keys are its arguments."
        )
    kind = named(str(spec["name"]), "trainer.init.model.name")
    arguments = {key: value for key, value in spec.items() if key != "name"}
    return lambda: _called("trainer.init.model", kind, arguments)


def _optimizer(spec: Any) -> Callable[[Any], Any]:
    name, arguments = _named_one("trainer.init.optimizer", spec)
    known = {one.lower(): one for one in optim.__all__ if inspect.isclass(getattr(optim, one))}
    kind = getattr(optim, known.get(name.lower(), ""), None)
    if kind is None:
        raise ConfigError(f"trainer.init.optimizer: there is no {name!r}.{_near(name, list(known.values()))}")
    if arguments.get("adjust_learning_rate") is not None:
        raise ConfigError(
            f"trainer.init.optimizer.{name}: adjust_learning_rate, rates for parts of the model, is not supported in "
            'files. Make the optimizer in Python, with groups that have "adjust_learning_rate", and a ScalePerParamLR.'
        )
    arguments = {"lr" if key == "learning_rate" else key: value for key, value in arguments.items()}
    if "lr" not in arguments and inspect.signature(kind).parameters["lr"].default is inspect.Parameter.empty:
        arguments["lr"] = 0.0  # set by the schedule
    return lambda model: _called(f"trainer.init.optimizer.{name}", kind, arguments, _groups(model))


def _groups(model: Any) -> list[dict[str, Any]]:
    """The trained parameters in two groups, as Model Zoo makes them: biases, and the weights of normalizations, do not
    decay.

    Raises:
        ConfigError: if parts of the model ask for rates of their own, as muP's do.
    """
    adjusted = getattr(model, "lr_adjustment_groups", None)
    if isinstance(adjusted, Mapping) and any(
        getattr(group, "scale", 1.0) not in (None, 1.0) for group in adjusted.values()
    ):
        raise ConfigError(
            f"trainer.init.model: this {type(model).__name__} asks for rates of their own for {', '.join(adjusted)}, "
            'which files do not support. Make the optimizer in Python, with groups that have "adjust_learning_rate", '
            "and a ScalePerParamLR."
        )
    decays: dict[Any, bool] = {}
    for module in model.modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                decays.setdefault(parameter, not is_norm and "bias" not in name)
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter, decay in decays.items() if decay]},
        {"params": [parameter for parameter, decay in decays.items() if not decay], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _one(at: str, spec: Any, module: Any) -> Any:
    """A callback or logger; None for one that has no effect here."""
    name, arguments = _named_one(at, spec)
    if name in _FLAGS:
        say_no_effect(f"{at}.{name}")
        return None
    kind = named(name, at) if "." in name else getattr(module, name, None)
    if kind is None or name not in module.__all__ and "." not in name:
        why = f" It {_UNSUPPORTED[name]}." if name in _UNSUPPORTED else _near(name, module.__all__)
        raise ConfigError(f"{at}: there is no {name!r}.{why}")
    return _called(f"{at}.{name}", kind, arguments)


def _loaders(at: str, spec: Any) -> Any:
    return [_loader(at, one) for one in spec] if isinstance(spec, list) else _loader(at, spec)


def _loader(at: str, spec: Any) -> Any:
    if not isinstance(spec, Mapping) or "data_processor" not in spec:
        raise ConfigError(
            f"{at}: write {{data_processor: package.module.function, ...}}; the other keys are its arguments."
        )
    make = named(str(spec["data_processor"]), at)
    arguments = {key: value for key, value in spec.items() if key != "data_processor"}

    def loader() -> Any:
        result = _called(at, make, arguments)
        return result.create_dataloader() if hasattr(result, "create_dataloader") else result

    return fl.utils.data.DataLoader(loader)


def _named_one(at: str, spec: Any) -> tuple[str, dict[str, Any]]:
    """Split {name: arguments}, or a name alone."""
    if isinstance(spec, str):
        return spec, {}
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise ConfigError(f"{at}: {spec!r} is not one name with its arguments, as {{AdamW: {{weight_decay: 0.1}}}}.")
    ((name, arguments),) = spec.items()
    return str(name), dict(arguments or {})


def _called(at: str, function: Any, arguments: Any, *first: Any) -> Any:
    """Call a function with arguments from the file; wrong arguments are a ConfigError."""
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{at}: {arguments!r} is not a mapping.")
    signature = inspect.signature(function)
    known = list(signature.parameters)[len(first) :]
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
        _check(at, arguments, known)
    try:
        signature.bind(*first, **arguments)
    except TypeError as error:
        raise ConfigError(f"{at}: {error}.") from None
    try:
        return function(*first, **arguments)
    except fl.errors.FirstlossError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{at}: {error}") from error


def _check(at: str, given: Any, known: Any) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{at}: {given!r} is not a mapping.")
    for key in given:
        if key not in known:
            why = f" It {_UNSUPPORTED[key]}." if key in _UNSUPPORTED else _near(str(key), list(known))
            raise ConfigError(f"{at}: there is no key {key!r} here.{why}")


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(sorted(known))}."


__all__ = ["phases", "read", "schedulers"]
