"""Construction of model, optimizer and schedulers from what the user passed: objects, callables, or a mix of both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

import firstloss as fl

from ..errors import TrainerError
from .checkpoint import Checkpoint
from .logging import Logging
from .loops import TrainingLoop, ValidationLoop
from .precision import Precision

Model = torch.nn.Module | Callable[[], torch.nn.Module]
Optimizer = torch.optim.Optimizer | Callable[[torch.nn.Module], torch.optim.Optimizer]
Schedulers = Iterable[Any] | Callable[[torch.optim.Optimizer], Any]

_EVERY = ("eval_every_steps", "eval_every_epochs", "eval_frequency")
_LAMBDAS = {
    "optimizer": "lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "schedulers": "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)",
}


def check_mix(model: Any, optimizer: Any, schedulers: Any) -> None:
    """Reject impossible combinations, such as an optimizer object for a model that does not exist yet."""
    if not isinstance(model, torch.nn.Module) and not callable(model):
        raise TrainerError(f"model is {_kind(model)}. Pass an nn.Module, or a callable that makes one: model=Model.")
    if optimizer is None and schedulers is not None:
        raise TrainerError("schedulers were given without an optimizer. Pass optimizer=... as well.")
    if isinstance(optimizer, type):
        raise TrainerError(
            f"optimizer is the class {optimizer.__name__}, which takes parameters rather than a model. Write "
            f"optimizer=lambda model: {optimizer.__name__}(model.parameters(), lr=...)."
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        if not isinstance(model, torch.nn.Module):
            raise TrainerError(
                "model is a callable, so its parameters do not exist yet, but optimizer is an object, made for other "
                f"parameters. Write optimizer={_LAMBDAS['optimizer']}."
            )
        _check_parameters(optimizer, model)
    elif optimizer is not None and not callable(optimizer):
        raise TrainerError(f"optimizer is {_kind(optimizer)}. Write optimizer={_LAMBDAS['optimizer']}.")
    if isinstance(schedulers, type):
        raise TrainerError(f"schedulers is the class {schedulers.__name__}. Write schedulers={_LAMBDAS['schedulers']}.")
    for scheduler in _objects(schedulers):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TrainerError(
                f"optimizer is a callable, so it does not exist yet, but the {type(scheduler).__name__} is an object, "
                f"which was made for another optimizer. Write schedulers={_LAMBDAS['schedulers']}."
            )
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise TrainerError(
                f"the {type(scheduler).__name__} was made for another optimizer than the one passed. Make it with this "
                "optimizer."
            )


def check_settings(loop: Any, checkpoint: Any, logging: Any, callbacks: Any, loggers: Any) -> None:
    """Check the types of the Trainer's arguments up front, rather than fail in the middle of a run."""
    _check_kind("loop", loop, (TrainingLoop, ValidationLoop), "TrainingLoop(max_steps=1000)")
    _check_kind("checkpoint", checkpoint, (Checkpoint,), "Checkpoint(steps=100)")
    _check_kind("logging", logging, (Logging,), "Logging(log_steps=10)")
    for name, given in (("callbacks", callbacks), ("loggers", loggers)):
        if given is not None and not isinstance(given, (list, tuple)):
            raise TrainerError(f"{name} is {_kind(given)}. Pass a list of them: {name}=[...].")


def check_validated(loop: TrainingLoop, checkpoint: Checkpoint, val_dataloader: Any, own: bool) -> None:
    """Reject settings that need validation when there is no validation loader; `own`: nor a callback that validates."""
    if val_dataloader is not None:
        return
    settings = [] if own else _EVERY
    wants = [f"{name}={value}" for name in settings if (value := getattr(loop, name)) not in (None, 0)]
    wants += [f"Checkpoint(best={checkpoint.best!r})"] if checkpoint.best is not None else []
    if wants:
        raise TrainerError(
            f"fit was given no val_dataloader, which {' and '.join(wants)} need{'' if wants[1:] else 's'}. Write "
            "fit(train_dataloader, val_dataloader), or leave that setting out."
        )


def make_precision(precision: Any) -> Precision:
    """A Precision, also from a dtype's name."""
    if isinstance(precision, str):
        return Precision(precision)
    _check_kind("precision", precision, (Precision,), 'Precision("bfloat16")')
    return precision or Precision()


def make_model(model: Model, backend: Any) -> torch.nn.Module:
    """Make the model; a callable is run under `backend.device`, which captures it where the backend can."""
    if isinstance(model, torch.nn.Module):
        return model
    _check_call("model", model, ())
    with backend.device:
        result = model()
    if not isinstance(result, torch.nn.Module):
        raise TrainerError(f"model={_name(model)} returned {_kind(result)} instead of an nn.Module.")
    return result


def make_optimizer(optimizer: Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of `model`."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    _check_call("optimizer", optimizer, (model,))
    try:
        result = optimizer(model)
    except TypeError as error:
        if "is not iterable" not in str(error):
            raise
        raise TrainerError(
            f"optimizer={_name(optimizer)} failed: {error}. It is called with the model, not with its parameters. "
            f"Write optimizer={_LAMBDAS['optimizer']}."
        ) from error
    if not isinstance(result, torch.optim.Optimizer):
        raise TrainerError(f"optimizer={_name(optimizer)} returned {_kind(result)} instead of an Optimizer.")
    _check_parameters(result, model)
    return result


def make_schedulers(schedulers: Schedulers | None, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Make the schedulers of `optimizer`, as a list."""
    if schedulers is None:
        return []
    items = [schedulers] if callable(schedulers) or hasattr(schedulers, "step") else list(schedulers)
    results: list[Any] = []
    for item in items:
        if not hasattr(item, "step"):
            _check_call("schedulers", item, (optimizer,))
        result = item if hasattr(item, "step") else item(optimizer)
        results += list(result) if isinstance(result, (list, tuple)) else [result]
    for scheduler in results:
        if not hasattr(scheduler, "step"):
            raise TrainerError(
                f"schedulers={_name(schedulers)} returned {_kind(scheduler)}, which has no step(). Write "
                f"schedulers={_LAMBDAS['schedulers']}."
            )
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TrainerError(
                "ReduceLROnPlateau steps on a validation metric, but schedulers here step once per update. Step it "
                "in a callback: make ReduceLROnPlateau(trainer.optimizer) in on_fit_start, and call its "
                'step(metrics["val_loss"]) in on_validation_end.'
            )
    return results


def is_traced(scheduler: Any) -> bool:
    """Whether a scheduler is a function of a step tensor and steps inside the traced step; PyTorch's step after it."""
    return isinstance(scheduler, fl.optim.lr_scheduler.Schedule)


def make_backend(backend: Any, device: str | None, artifact_dir: str) -> Any:
    """The given backend, or a new one by name ("XLA" by default) that keeps its artifacts in `artifact_dir`."""
    if backend is not None and device is not None:
        raise TrainerError("device and backend are two names of one setting. Pass one of them.")
    if backend is None or isinstance(backend, str):
        return fl.backend(backend or device or "XLA", artifact_dir=artifact_dir)
    if not hasattr(backend, "is_xla"):
        raise TrainerError(f'backend is {_kind(backend)}. Write backend=firstloss.backend("XLA"), or its name.')
    return backend


def _check_kind(name: str, value: Any, kinds: tuple[type, ...], example: str) -> None:
    if value is not None and not isinstance(value, kinds):
        given_as = f"the class {value.__name__}" if isinstance(value, type) else _kind(value)
        raise TrainerError(f"{name} is {given_as}. Write {name}={example}.")


def _check_call(name: str, function: Any, args: tuple[Any, ...]) -> None:
    """Check a callable's signature against the Trainer's call, so that the error does not come from within the call."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        example = _LAMBDAS.get(name, f"lambda: {_name(function)}(...)")
        given = {"model": "no argument", "optimizer": "the model", "schedulers": "the optimizer"}[name]
        raise TrainerError(
            f"{name}={_name(function)}{signature} is called with {given}: {error}. Write {name}={example}."
        ) from None


def _objects(schedulers: Any) -> list[Any]:
    if hasattr(schedulers, "step"):
        return [schedulers]
    if schedulers is None or callable(schedulers):
        return []
    return [scheduler for scheduler in schedulers if hasattr(scheduler, "step")]


def _check_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    own = {id(p) for p in model.parameters()}
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in own for p in optimized)
    if foreign:
        raise TrainerError(
            f"{foreign} of the optimizer's {len(optimized)} parameters are not the model's, so it would train "
            "something else. Make the optimizer from the model that is passed to the Trainer."
        )


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))
