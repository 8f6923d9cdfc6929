"""`firstloss schema`: print a JSON Schema of the run file, for editors."""

from __future__ import annotations

import argparse
import inspect
import json
import typing
from typing import Any

from . import output

NAME = "schema"
HELP = "print a JSON Schema of the run file, with which editors complete and check it"
EXAMPLE = "firstloss schema > run.schema.json   (and in the file: # yaml-language-server: $schema=run.schema.json)"
ACCEPTS_OVERRIDES = False

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object", list: "array"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    if args.json:
        output.print_json(schema())
    else:
        print(json.dumps(schema(), indent=1))
    return 0


def schema() -> dict[str, Any]:
    """The schema of both layouts: Firstloss's, and Model Zoo's with `trainer.init`."""
    from .config import ConfiguredTrainer

    configured, model_zoo = _of(ConfiguredTrainer), _model_zoo()
    phases = {"type": "array", "minItems": 1, "items": _object({"trainer": model_zoo}, required=["trainer"])}
    run = {"train_dataloader": _CALLABLE, "val_dataloader": _CALLABLE, "ckpt_path": {"type": ["string", "null"]}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run of firstloss fit and validate",
        "type": "object",
        "required": ["trainer"],
        "properties": {"trainer": {"anyOf": [model_zoo, configured, phases]}, **run},
        "additionalProperties": False,
    }


_CALLABLE = {
    "anyOf": [
        {"type": "string", "description": "package.module.name"},
        {"type": "object", "properties": {"class_path": {"type": "string"}, "init_args": {"type": "object"}}},
        {"type": "null"},
    ]
}


def _model_zoo() -> dict[str, Any]:
    from firstloss.trainer import callbacks, loggers

    from ..cstorch import optim
    from ..distributed import ClusterConfig
    from .modelzoo import SETTINGS

    schedules = {
        name: kind
        for module in (optim.lr_scheduler, optim.weight_decay_scheduler)
        for name in module.__all__
        if inspect.isclass(kind := getattr(module, name)) and name.endswith(("LR", "WD", "Restarts"))
    }
    optimizers = {n: k for n in optim.__all__ if inspect.isclass(k := getattr(optim, n))}
    loader = {"type": "object", "required": ["data_processor"], "properties": {"data_processor": {"type": "string"}}}
    loaders = {"anyOf": [loader, {"type": "array", "items": loader}]}
    cluster = _of(ClusterConfig)
    backend = {"type": "object", "properties": {"backend_type": {"enum": ["CSX", "XLA", "CPU", "GPU"]}}}
    backend["properties"]["cluster_config"] = cluster  # type: ignore[index]
    path = {"type": ["string", "null"]}
    init = {
        "backend": {"anyOf": [{"enum": ["CSX", "XLA", "CPU", "GPU"]}, backend]},
        "device": {"enum": ["CSX", "XLA", "CPU", "GPU"]},
        "model_dir": {"type": "string"},
        "seed": {"type": ["integer", "null"]},
        "model": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
        "optimizer": _one_of(optimizers, skip=1),
        "schedulers": {"type": "array", "items": _one_of(schedules, skip=1)},
        "callbacks": {"type": "array", "items": _one_of(_classes(callbacks))},
        "loggers": {"type": "array", "items": _one_of(_classes(loggers))},
        **{name: _of(kind) for name, kind in SETTINGS.items()},
    }
    return _object(
        {
            "init": _object(init),
            "fit": _object({"train_dataloader": loader, "val_dataloader": loaders, "ckpt_path": path}),
            "validate": _object({"val_dataloader": loaders, "ckpt_path": path}),
            "validate_all": _object({"val_dataloaders": loaders, "ckpt_paths": {"type": ["string", "array"]}}),
        },
        required=["init"],
    )


def _classes(module: Any) -> dict[str, Any]:
    return {name: kind for name in module.__all__ if inspect.isclass(kind := getattr(module, name))}


def _one_of(kinds: dict[str, Any], skip: int = 0) -> dict[str, Any]:
    """A class's name, alone or as {name: arguments}; unlisted classes by a path with a dot."""
    listed = {name: {"anyOf": [_of(kind, skip), {"type": "null"}]} for name, kind in kinds.items()}
    table = {"type": "object", "minProperties": 1, "maxProperties": 1, "properties": listed}
    others = {"patternProperties": {r"\.": {"type": ["object", "null"]}}, "additionalProperties": False}
    return {"anyOf": [{"enum": sorted(kinds)}, {**table, **others}]}


def _of(function: Any, skip: int = 0) -> dict[str, Any]:
    """The arguments of a class or function as an object schema."""
    signature = inspect.signature(function)
    try:
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except Exception:  # a name imported under TYPE_CHECKING
        hints = {}
    properties, required, open_ended = {}, [], False
    for name, parameter in list(signature.parameters.items())[skip:]:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            open_ended = True
            continue
        property_schema = _type(hints.get(name, Any))
        if isinstance(parameter.default, (int, float, str, bool)):
            property_schema = {**property_schema, "default": parameter.default}
        properties[name] = property_schema
        # Model Zoo's files leave these two to the schedule and to the schedule's parts.
        if parameter.default is inspect.Parameter.empty and name not in ("lr", "milestones"):
            required.append(name)
    object_schema = _object(properties, required)
    doc = inspect.getdoc(function) or ""
    object_schema["description"] = " ".join(doc.partition("\n\n")[0].split())
    return {**object_schema, "additionalProperties": True} if open_ended else object_schema


def _type(hint: Any) -> dict[str, Any]:
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if hint is type(None):
        return {"type": "null"}
    origin = typing.get_origin(hint)
    if origin in (list, tuple):
        return {"type": "array"}
    if origin is dict:
        return {"type": "object"}
    if origin is typing.Union or str(type(hint)) == "<class 'types.UnionType'>":
        parts = [_type(part) for part in typing.get_args(hint)]
        return {} if {} in parts else {"anyOf": parts}
    if inspect.isclass(hint) and hasattr(hint, "__dataclass_fields__"):
        return _of(hint)
    return {}


def _object(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    object_schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**object_schema, "required": required} if required else object_schema
