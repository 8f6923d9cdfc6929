"""Firstloss: start big PyTorch models fast.

`import firstloss as fl`; the public names are in the table below. Deferred initialisation needs only torch and numpy;
JAX is imported when a step is first compiled or a StableHLO module is first requested.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from .dependencies import is_jax, watch_import_of_jax, without_jax

# Public name -> the module that defines it, imported on first use.
_MODULES = {
    "deferred_init": ".capture.deferred",
    "deferred": ".capture.deferred",
    "is_deferred": ".capture.deferred",
    "materialize_tensor": ".init.materialize_module",
    "materialize_module": ".init.materialize_module",
    "save_initialized": ".init.disk.save",
    "init_program": ".init.init_program",
    "lower": ".init.init_program",
    "check_init": ".init.unwritten",
    "shard": ".init.shardings",
    "mark_sharding": ".init.shardings",
    "run_stablehlo": ".init.stablehlo.module_file",
    "backend": ".runtime.make_backend",
    "current_backend": ".runtime.backend",
    "current_torch_device": ".runtime.backend",
    "use_cs": ".runtime.backend",
    "compile": ".runtime.compiled_model",
    "trace": ".runtime.step.trace",
    "Pad": ".runtime.step.shapes",
    "load_step": ".runtime.exported_step",
    "step_closure": ".runtime.step.closures",
    "checkpoint_closure": ".runtime.step.closures",
    "current_executor": ".utils.data.executor",
    "metrics": ".metrics",
    "cstorch": ".cstorch",
    "utils": ".utils",
    "distributed": ".distributed",
    "save": ".runtime.checkpoint.checkpoint",
    "load": ".runtime.checkpoint.checkpoint",
    "register_lowering": ".lower.custom_ops",
    "errors": ".errors",
    "amp": ".amp",
    "optim": ".optim",
    "timeline": ".timeline",
}

__all__ = sorted(_MODULES)
__version__ = "0.1.0"

watch_import_of_jax()


def __getattr__(name: str) -> Any:
    module_name = _MODULES.get(name)
    if module_name is None:
        raise AttributeError(f"module 'firstloss' has no attribute {name!r}")
    try:
        module = importlib.import_module(module_name, __name__)
    except ModuleNotFoundError as error:
        if is_jax(error):
            raise without_jax(f"firstloss.{name}", error) from error
        raise
    value = module if module_name == f".{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _Lower(ModuleType):
    """The package `firstloss.lower`. Its import gives it the name of `fl.lower`, so it calls that."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module(_MODULES["lower"], "firstloss").lower(*args, **kwargs)


class _Firstloss(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "lower" and type(value) is ModuleType:
            value.__class__ = _Lower
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Firstloss
