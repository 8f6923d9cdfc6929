"""The types of the public names, which `__init__.py` imports on first use."""

from . import amp, cstorch, distributed, errors, metrics, optim, timeline, utils
from .capture.deferred import deferred, deferred_init, is_deferred
from .init.disk.save import save_initialized
from .init.init_program import init_program, lower
from .init.materialize_module import materialize_module, materialize_tensor
from .init.shardings import mark_sharding, shard
from .init.stablehlo.module_file import run_stablehlo
from .init.unwritten import check_init
from .lower.custom_ops import register_lowering
from .runtime.backend import current_backend, current_torch_device, use_cs
from .runtime.checkpoint.checkpoint import load, save
from .runtime.compiled_model import compile
from .runtime.exported_step import load_step
from .runtime.make_backend import backend
from .runtime.step.closures import checkpoint_closure, step_closure
from .runtime.step.shapes import Pad
from .runtime.step.trace import trace
from .utils.data.executor import current_executor

__version__: str

__all__ = [
    "Pad",
    "amp",
    "backend",
    "check_init",
    "checkpoint_closure",
    "compile",
    "cstorch",
    "current_backend",
    "current_executor",
    "current_torch_device",
    "deferred",
    "deferred_init",
    "distributed",
    "errors",
    "init_program",
    "is_deferred",
    "load",
    "load_step",
    "lower",
    "mark_sharding",
    "materialize_module",
    "materialize_tensor",
    "metrics",
    "optim",
    "register_lowering",
    "run_stablehlo",
    "save",
    "save_initialized",
    "shard",
    "step_closure",
    "timeline",
    "trace",
    "use_cs",
    "utils",
]
