"""PyTorch's private names that Firstloss uses, each with the reason."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .names import Name, resolve

if TYPE_CHECKING:  # for annotations
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# The versions of PyTorch on which the tests have been run (make test TORCH=...).
TESTED = ("2.11.0", "2.13.0", "2.15.0")

PARAMETER_FLAG = "_is_param"  # set on parameters of tensor subclasses
HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")  # a tensor's
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
STATE_DICT_METADATA = "_metadata"  # on what Module.state_dict() returns: the version of each module's state

# Branches on values in PyTorch's Python code that only validate, by module and function: the condition's value if the
# input is valid, and the error's text if not.
VALIDATIONS = {
    ("torch.nn.functional", "gaussian_nll_loss"): (False, "gaussian_nll_loss: var has negative entry/entries"),
    ("torch.distributions.distribution", "__init__"): (True, "a parameter of a distribution is outside its support"),
    ("torch.distributions.distribution", "_validate_sample"): (
        True,
        "a value passed to log_prob, cdf or the like is outside the support of the distribution",
    ),
}
VALIDATION_HELPER = "_all_true_or_runtime_assert"  # used by distributions since PyTorch 2.15


def is_parameter(tensor: Any) -> bool:
    """Whether a tensor of another class than Parameter is a parameter."""
    return getattr(tensor, PARAMETER_FLAG, False)


def disable_dynamo(undo: Callable[..., None]) -> None:
    """Let functions of `torch.compile` run as written, as with `torch.compiler.set_stance("force_eager")`, until `undo`
    runs what it is given. Nobody may have imported dynamo, which takes a second: `keep_dynamo_disabled` is for that."""
    module = _dynamo()
    undo(_set_stance, None if module is None else module._stance)
    keep_dynamo_disabled()


def keep_dynamo_disabled() -> None:
    """Disable a dynamo that has been imported since `disable_dynamo`."""
    module = _dynamo()
    if module is not None:
        module._set_stance(module.DynamoStance("force_eager"))


def _dynamo() -> Any:
    return _imported("eval_frame") if NAMES["eval_frame"].target in sys.modules else None


def _set_stance(stance: Any) -> None:
    """Set dynamo's stance; None: the one with which it is imported."""
    module = _dynamo()
    if module is not None:
        module._set_stance(stance or module.DynamoStance())


def _operation() -> Any:
    return torch.ops.aten.add.Tensor


def _tensor() -> torch.Tensor:
    return torch.Tensor()


_EVERYTHING = "everything"

NAMES = {
    "C": Name("torch._C", "Re-reads settings that a step has read", "guards of steps"),
    # -- the dispatcher --
    "DisableTorchDispatch": Name(
        "torch._C._DisableTorchDispatch",
        "Computes eagerly while a capture is open; no public context disables modes and subclasses alike",
        _EVERYTHING,
    ),
    "DisableAutocast": Name(
        "torch._C._DisableAutocast",
        "Computes what a step has recorded, with the casts that it has recorded",
        "steps that read values under autocast",
    ),
    "InferenceMode": Name(
        "torch._C._InferenceMode",
        "Entered and left in C, and restores the grad mode, too: `torch.inference_mode` and `torch.no_grad` can be "
        "interrupted in between, and leave their modes behind",
        _EVERYTHING,
    ),
    "DisableTorchFunction": Name(
        "torch._C.DisableTorchFunction", "Inspects a tensor within a `__torch_function__` mode", "control flow in steps"
    ),
    "DisableTorchFunctionSubclass": Name(
        "torch._C.DisableTorchFunctionSubclass",
        "Calls PyTorch from a deferred tensor's `__torch_function__`",
        "use of a model that has not been materialized",
    ),
    "disabled_torch_function": Name(
        "torch._C._disabled_torch_function_impl", "Deferred tensors need no `__torch_function__`", _EVERYTHING
    ),
    "StorageWeakRef": Name(
        "torch.multiprocessing.reductions.StorageWeakRef",
        "Keeps a storage's address from being used again",
        "`firstloss.check_init`",
    ),
    "default_store": Name(
        "torch.distributed.distributed_c10d._get_default_store",
        "Compares ranks without a collective, for which all would have to wait",
        "`firstloss.check_init` on several ranks",
    ),
    "FakeStore": Name(
        "torch.testing._internal.distributed.fake_pg.FakeStore",
        "Its module registers the backend whose processes exist by name only",
        "`firstloss check-init --ranks`",
    ),
    "TorchDispatchMode": Name(
        "torch.utils._python_dispatch.TorchDispatchMode", "Sees every operation of a capture", _EVERYTHING
    ),
    "get_current_dispatch_mode_stack": Name(
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "Closes modes that an interrupted step left open",
        "tracing steps",
    ),
    "pop_mode": Name("torch.utils._python_dispatch._pop_mode", "As above", "tracing steps"),
    "get_current_function_mode_stack": Name(
        "torch.overrides._get_current_function_mode_stack",
        "Detects that a step runs under another `torch.device`",
        "tracing steps",
    ),
    "dispatch_modes_count": Name(
        "torch._C._len_torch_dispatch_stack",
        "Detects modes of the user's, which a compiled step would bypass",
        "tracing steps",
    ),
    "saved_tensor_hooks": Name(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "Detects saved-tensor hooks, which a compiled step would bypass",
        "tracing steps",
        otherwise=lambda ignore_is_tracing: None,
    ),
    "without_functorch": Name(
        "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
        "Draws weights that are first used under `torch.vmap`",
        "the first use of a deferred model under `torch.func` on one core",
        otherwise=contextlib.nullcontext,
    ),
    "are_functorch_transforms_active": Name(
        "torch._C._are_functorch_transforms_active", "Leaves gradients under `torch.func` alone", "backward()"
    ),
    "set_grad_enabled": Name(
        "torch._C._set_grad_enabled", "Sets grad mode as a step has left it; the public one is a context", "tracing"
    ),
    "global_device_context": Name(
        "torch._GLOBAL_DEVICE_CONTEXT", "Whether a default device is set", "tracing steps", otherwise=object()
    ),
    # -- operations --
    "OpOverload": Name("torch._ops.OpOverload", "The class of dispatched operations", _EVERYTHING),
    "OpOverloadPacket": Name("torch._ops.OpOverloadPacket", "Users register lowerings for packets", "lowering"),
    "schema_of": Name(
        "_schema", "An operation's arguments, and which of them it mutates", _EVERYTHING, "OpOverload", _operation
    ),
    "overload_name": Name(
        "_overloadname", "Finds an operation's functional overload", _EVERYTHING, "OpOverload", _operation
    ),
    "can_decompose": Name(
        "_can_decompose", "Whether an operation has a composite kernel", "lowering", "OpOverload", _operation
    ),
    "decomposition_table": Name(
        "torch._decomp.decomposition_table",
        "Decomposes operations without a rule",
        "lowering of operations that have neither a rule nor a composite kernel",
    ),
    "OPDEFS": Name(
        "torch._library.custom_ops.OPDEFS",
        "The Python code of PyTorch's own custom_op operations",
        "lowering of operations in the namespace torch_nn",
    ),
    "python_of": Name("_init_fn", "As above", "as above", "torch.library.CustomOpDef"),
    "suggest_memory_format": Name(
        "torch._prims_common.suggest_memory_format", "The strides of convolutions' results", "capture of convolutions"
    ),
    "FakeTensorMode": Name(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "Reads the index of PyTorch's checkpoint files without the weights",
        "loading checkpoints written by torch.save",
    ),
    "checkpoint_offset": Name(
        "_checkpoint_offset", "A storage's offset in its file", "as above", "torch.UntypedStorage"
    ),
    "neg_view": Name(
        "torch._neg_view", "A view with the negative bit", "loading such a tensor, and materializing `x.conj().imag`"
    ),
    "pytree": Name("torch.utils._pytree", "Flattens arguments and results of users' functions", "tracing steps"),
    # -- tensors --
    "make_wrapper_subclass": Name("torch.Tensor._make_wrapper_subclass", "Makes tensors without memory", _EVERYTHING),
    "swap_tensor_impl": Name(
        "torch._C._swap_tensor_impl",
        "Makes a deferred parameter real while it keeps its identity; swap_tensors rejects weak references",
        _EVERYTHING,
    ),
    "throw_on_mutable_data_ptr": Name(
        "torch._C._set_throw_on_mutable_data_ptr",
        "Makes C++ code that asks a deferred tensor for memory raise, rather than get a null pointer",
        "nothing; the error is a different one",
        otherwise=lambda tensor: None,
    ),
    "version_of": Name("_version", "Whether a constant was edited after capture", _EVERYTHING, "torch.Tensor", _tensor),
    "preserve_version_counter": Name(
        "torch.autograd._unsafe_preserve_version_counter",
        "Swapping a weight's memory in a step does not bump its version, as in eager PyTorch",
        "`weight.data = ...` in steps",
    ),
    "base_of": Name("_base", "The tensor that a view is of", _EVERYTHING, "torch.Tensor", _tensor),
    "creation_meta_of": Name(
        "torch._C._autograd._get_creation_meta",
        "Keeps the mark of views made in no_grad mode when they are materialized",
        "materializing views of weights",
    ),
    "set_creation_meta": Name("torch._C._autograd._set_creation_meta", "As above", "as above"),
    "backward_hooks": Name(
        "_backward_hooks", "Tensors with hooks are not replaced", "tracing", "torch.Tensor", _tensor
    ),
    "post_accumulate_grad_hooks": Name("_post_accumulate_grad_hooks", "As above", "tracing", "torch.Tensor", _tensor),
    "parameter_flag": Name(
        PARAMETER_FLAG,
        "Marks parameters of other tensor classes",
        "isinstance(deferred, Parameter)",
        "torch.Tensor",
    ),
    "use_count": Name(
        "_use_count", "Whether a graph holds a weight", "gradients of what a step returned", "torch.Tensor", _tensor
    ),
    "current_autograd_node": Name(
        "torch._C._current_autograd_node", "Maps backward operations to their forward operation", "tracing backward()"
    ),
    "current_graph_task_id": Name(
        "torch._C._current_graph_task_id", "Whether backward() is running", "use of a model that is still deferred"
    ),
    "storage_address": Name(
        "_cdata", "Identifies storages", "tracing steps", "torch.UntypedStorage", lambda: torch.UntypedStorage(0)
    ),
    "storage_uses": Name(
        "torch._C._storage_Use_Count", "Whether a storage has other owners, so that it must not be written", "tracing"
    ),
    "local_tensor": Name(
        "_local_tensor",
        "This rank's shard, without autograd",
        "DTensor",
        "torch.distributed.tensor.DTensor",
    ),
    # -- modules and optimizers --
    "parameters_of": Name(
        "_parameters", "A module's parameters, including None", _EVERYTHING, "torch.nn.Module", torch.nn.Module
    ),
    "buffers_of": Name("_buffers", "As above", _EVERYTHING, "torch.nn.Module", torch.nn.Module),
    "unsaved_buffers_of": Name(
        "_non_persistent_buffers_set",
        "Names them as such",
        "`firstloss.check_init`",
        "torch.nn.Module",
        torch.nn.Module,
    ),
    "apply_of": Name("_apply", "Implements Module.to_empty", "Module.to_empty", "torch.nn.Module", torch.nn.Module),
    "call_impl": Name(
        "torch.nn.Module._call_impl",
        "Modules skip hooks with always_call=True while torch.compiler.is_compiling()",
        "hooks with always_call=True in steps",
    ),
    "fast_path_is_enabled": Name(
        "_is_fastpath_enabled",
        "The user's setting, while a step sees the fast path as disabled",
        "encoders in steps",
        "torch.backends.mha",
        lambda: torch.backends.mha,
    ),
    "canonical_mask": Name(
        "torch.nn.functional._canonical_mask", "A padding mask in the form that attention takes", "encoders in steps"
    ),
    "input_check": Name(
        "_check_input_dim",
        "Checks inputs as BatchNorm.forward does",
        "BatchNorm(momentum=None) in steps",
        "torch.nn.BatchNorm1d",
        lambda: torch.nn.BatchNorm1d,
    ),
    "step_pre_hooks": Name(
        "_optimizer_step_pre_hooks",
        "Skips hooks where state is created before the first step",
        "tracing steps",
        "torch.optim.Optimizer",
    ),
    "step_post_hooks": Name("_optimizer_step_post_hooks", "As above", "tracing steps", "torch.optim.Optimizer"),
    "global_step_pre_hooks": Name(
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "Retraces a step when hooks are added or removed",
        "tracing",
    ),
    "global_step_post_hooks": Name("torch.optim.optimizer._global_optimizer_post_hooks", "As above", "tracing"),
    "eval_frame": Name(
        "torch._dynamo.eval_frame",
        "Runs what `torch.compile` wraps as written in a step; an interrupt could prevent the end of "
        "`torch.compiler.set_stance`",
        "functions of `torch.compile` in traced steps",
    ),
    "finished_work": Name(
        "torch._C._distributed_c10d.FakeWork", "What a collective of one process returns", "collectives in steps"
    ),
    "process_group_of_name": Name(
        "torch.distributed.distributed_c10d._resolve_process_group",
        "The size of a functional collective's group",
        "collectives in steps",
    ),
    "fsdp_state_of": Name(
        "_get_fsdp_state",
        "Finds the hooks of fully_shard over one process, to remove them",
        "firstloss.compile of models after fully_shard",
        "torch.distributed.fsdp.FSDPModule",
    ),
    "operation_handlers": Name(
        "_op_dispatcher._custom_op_handlers",
        "Adds Firstloss's operations to DTensor's table",
        "initialising DTensors",
        "torch.distributed.tensor.DTensor",
    ),
}


def inner_overload(op: Any) -> Any:
    """The overload of what `torch.library.custom_op` returns; other operations are returned as they are."""
    return getattr(op, "_opoverload", op)


# Process-wide settings (torch.backends etc.): the getter and the setter of each in torch._C.
_SETTINGS = {
    "get_num_threads": "set_num_threads",
    "is_anomaly_enabled": "set_anomaly_enabled",
    "_get_deterministic_algorithms": "_set_deterministic_algorithms",
    "_get_deterministic_fill_uninitialized_memory": "_set_deterministic_fill_uninitialized_memory",
    "_get_float32_matmul_precision": "_set_float32_matmul_precision",
    "_get_warnAlways": "_set_warnAlways",
    "_get_cudnn_enabled": "_set_cudnn_enabled",
    "_get_cudnn_benchmark": "_set_cudnn_benchmark",
    "_get_cudnn_deterministic": "_set_cudnn_deterministic",
    "_get_cudnn_allow_tf32": "_set_cudnn_allow_tf32",
    "_get_cublas_allow_tf32": "_set_cublas_allow_tf32",
    "_get_mkldnn_enabled": "_set_mkldnn_enabled",
    "_get_nnpack_enabled": "_set_nnpack_enabled",
    "_get_flash_sdp_enabled": "_set_sdp_use_flash",
    "_get_math_sdp_enabled": "_set_sdp_use_math",
    "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
}


def settings_of_torch() -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """The getters and setters of PyTorch's settings that a step may read or set, as far as this version has them."""
    module = _imported("C")
    pairs = [(getattr(module, read, None), getattr(module, write, None)) for read, write in _SETTINGS.items()]
    return [(read, write) for read, write in pairs if callable(read) and callable(write)]


def local_tensor_or(tensor: Any, otherwise: Any) -> Any:
    """The local shard of a DTensor, without autograd; `otherwise` for any other tensor."""
    return getattr(tensor, "_local_tensor", otherwise)


def fsdp_groups(state: Any) -> list[Any]:
    """The parameter groups of a module's FSDP state (one group before PyTorch 2.12)."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def remove_fsdp_hooks(state: Any) -> None:
    """Remove the hooks of `fully_shard`, and its record of the parameters; the module's methods then do nothing."""
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups = []
    else:
        state._fsdp_param_group = None


def storage_use_count(storage: Any) -> int:
    """The number of references to a storage, its Python object included."""
    return _imported("storage_uses")(_imported("storage_address")(storage))


def _imported(name: str) -> Any:
    return globals().get(name) or __getattr__(name)


def __getattr__(name: str) -> Any:
    row = NAMES.get(name)
    if row is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = resolve(row)
    return value
