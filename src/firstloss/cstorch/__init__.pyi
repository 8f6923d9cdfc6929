"""The types of the names, which `__init__.py` imports on first use."""

from typing import Any

from firstloss import (
    Pad,
    check_init,
    checkpoint_closure,
    compile,
    current_executor,
    current_torch_device,
    deferred,
    deferred_init,
    errors,
    init_program,
    is_deferred,
    load_step,
    mark_sharding,
    materialize_module,
    materialize_tensor,
    metrics,
    register_lowering,
    run_stablehlo,
    save_initialized,
    shard,
    step_closure,
    timeline,
    trace,
    use_cs,
)
from firstloss.runtime.device.numpy_arrays import from_numpy, to_numpy

from . import amp, distributed, nn, optim, profiler, utils
from .accepted import (
    add_debug_name,
    current_pol,
    device_annotation,
    get_debug_name,
    make_constant,
    name_scope,
    pol,
    register_decomposition,
    set_debug_scope,
)
from .filled import full, full_like, ones, ones_like, zeros, zeros_like
from .install import install
from .on_device import tensor
from .renamed import backend, current_backend, device, load, save

# Modules that exist in `sys.modules` only; see submodules.py.
backends: Any
core: Any
experimental: Any
mesh: Any
sparse: Any
storage: Any

__all__ = [
    "Pad",
    "add_debug_name",
    "amp",
    "backend",
    "backends",
    "check_init",
    "checkpoint_closure",
    "compile",
    "core",
    "current_backend",
    "current_executor",
    "current_pol",
    "current_torch_device",
    "deferred",
    "deferred_init",
    "device",
    "device_annotation",
    "distributed",
    "errors",
    "experimental",
    "from_numpy",
    "full",
    "full_like",
    "get_debug_name",
    "init_program",
    "install",
    "is_deferred",
    "load",
    "load_step",
    "make_constant",
    "mark_sharding",
    "materialize_module",
    "materialize_tensor",
    "mesh",
    "metrics",
    "name_scope",
    "nn",
    "ones",
    "ones_like",
    "optim",
    "pol",
    "profiler",
    "register_decomposition",
    "register_lowering",
    "run_stablehlo",
    "save",
    "save_initialized",
    "set_debug_scope",
    "shard",
    "sparse",
    "step_closure",
    "storage",
    "tensor",
    "timeline",
    "to_numpy",
    "trace",
    "use_cs",
    "utils",
    "zeros",
    "zeros_like",
]
