"""The private names of PyTorch that Firstloss uses, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .names import Name, resolve

if TYPE_CHECKING:  # what is annotated with
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# The versions of PyTorch that the suite has been run on (make test TORCH=...).
TESTED = ("2.11.0", "2.13.0", "2.15.0")

PARAMETER_FLAG = "_is_param"  # set on a Parameter that is of a class of its own
HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
STATE_DICT_METADATA = "_metadata"  # of what Module.state_dict() returns: the version of each layer's state

# Branches on values in PyTorch's Python that only validate, by module and function: the condition's value if all is
# well, and what is wrong if it has not that value.
VALIDATIONS = {
    ("torch.nn.functional", "gaussian_nll_loss"): (False, "gaussian_nll_loss: var has negative entry/entries"),
    ("torch.distributions.distribution", "__init__"): (True, "a parameter of a distribution is outside its support"),
    ("torch.distributions.distribution", "_validate_sample"): (
        True,
        "a value whose log_prob, cdf or the like is asked for is outside the support of the distribution",
    ),
}
VALIDATION_HELPER = "_all_true_or_runtime_assert"  # through which distributions do so since PyTorch 2.15


def is_parameter(tensor: Any) -> bool:
    """Whether a tensor of a class that is not Parameter's is a parameter."""
    return getattr(tensor, PARAMETER_FLAG, False)


def _operation() -> Any:
    return torch.ops.aten.add.Tensor


def _tensor() -> torch.Tensor:
    return torch.Tensor()


_EVERYTHING = "everything"

NAMES = {
    "C": Name("torch._C", "Asks again for settings that a step has asked for", "guards of steps"),
    # -- the dispatcher --
    "DisableTorchDispatch": Name(
        "torch._C._DisableTorchDispatch",
        "Computes at once, on real tensors, while a capture is open; no public context ends modes and subclasses alike",
        _EVERYTHING,
    ),
    "DisableTorchFunction": Name(
        "torch._C.DisableTorchFunction", "Looks at a tensor within a `__torch_function__` mode", "control flow in steps"
    ),
    "DisableTorchFunctionSubclass": Name(
        "torch._C.DisableTorchFunctionSubclass",
        "Calls PyTorch from a deferred tensor's `__torch_function__`",
        "use of a model that has not been materialized",
    ),
    "disabled_torch_function": Name(
        "torch._C._disabled_torch_function_impl", "Deferred tensors need no `__torch_function__`", _EVERYTHING
    ),
    "TorchDispatchMode": Name(
        "torch.utils._python_dispatch.TorchDispatchMode", "Sees every operation of a capture", _EVERYTHING
    ),
    "get_current_dispatch_mode_stack": Name(
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "Closes modes that an interrupted step has left open",
        "tracing steps",
    ),
    "pop_mode": Name("torch.utils._python_dispatch._pop_mode", "As above", "tracing steps"),
    "get_current_function_mode_stack": Name(
        "torch.overrides._get_current_function_mode_stack",
        "A step under another `torch.device` is another step",
        "tracing steps",
    ),
    "dispatch_modes_count": Name(
        "torch._C._len_torch_dispatch_stack", "A mode of the user's would see none of a compiled step", "tracing steps"
    ),
    "saved_tensor_hooks": Name(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "Nor would hooks of saved tensors",
        "tracing steps",
        otherwise=lambda ignore_is_tracing: None,
    ),
    "are_functorch_transforms_active": Name(
        "torch._C._are_functorch_transforms_active", "Gradients under `torch.func` are another matter", "backward()"
    ),
    "set_grad_enabled": Name(
        "torch._C._set_grad_enabled", "Leaves gradients on or off as a step has; the public one is a context", "tracing"
    ),
    "global_device_context": Name(
        "torch._GLOBAL_DEVICE_CONTEXT", "Tells no default device from the CPU", "tracing steps", otherwise=object()
    ),
    # -- operations --
    "OpOverload": Name("torch._ops.OpOverload", "What a dispatched operation is", _EVERYTHING),
    "OpOverloadPacket": Name("torch._ops.OpOverloadPacket", "What a user registers a lowering for", "lowering"),
    "schema_of": Name(
        "_schema", "What an operation's arguments are, and which it writes to", _EVERYTHING, "OpOverload", _operation
    ),
    "overload_name": Name(
        "_overloadname", "Finds an operation's functional twin", _EVERYTHING, "OpOverload", _operation
    ),
    "can_decompose": Name(
        "_can_decompose", "Whether an operation has a composite kernel", "lowering", "OpOverload", _operation
    ),
    "decomposition_table": Name(
        "torch._decomp.decomposition_table",
        "What operations without a rule are made of",
        "lowering of operations that have neither a rule nor a composite kernel",
    ),
    "OPDEFS": Name(
        "torch._library.custom_ops.OPDEFS",
        "The Python of operations that PyTorch makes with custom_op",
        "lowering of operations in the namespace torch_nn",
    ),
    "python_of": Name("_init_fn", "As above", "as above", "torch.library.CustomOpDef"),
    "suggest_memory_format": Name(
        "torch._prims_common.suggest_memory_format", "The strides of convolutions' results", "capture of convolutions"
    ),
    "FakeTensorMode": Name(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "Reads the table of contents of PyTorch's checkpoint files, and no weight",
        "loading checkpoints written by torch.save",
    ),
    "checkpoint_offset": Name(
        "_checkpoint_offset", "Where in its file a storage is", "as above", "torch.UntypedStorage"
    ),
    "neg_view": Name(
        "torch._neg_view", "A view with the negative bit", "loading such a tensor, and materializing `x.conj().imag`"
    ),
    "pytree": Name("torch.utils._pytree", "Flattens what users' functions take and return", "tracing steps"),
    # -- tensors --
    "make_wrapper_subclass": Name("torch.Tensor._make_wrapper_subclass", "Makes tensors without memory", _EVERYTHING),
    "swap_tensor_impl": Name(
        "torch._C._swap_tensor_impl",
        "A deferred parameter turns real and keeps its identity; swap_tensors refuses weak references",
        _EVERYTHING,
    ),
    "throw_on_mutable_data_ptr": Name(
        "torch._C._set_throw_on_mutable_data_ptr",
        "C++ that asks a deferred tensor for memory gets an error, not a null pointer",
        "nothing; the error is another",
        otherwise=lambda tensor: None,
    ),
    "version_of": Name("_version", "Whether a constant was edited after capture", _EVERYTHING, "torch.Tensor", _tensor),
    "preserve_version_counter": Name(
        "torch.autograd._unsafe_preserve_version_counter",
        "A weight given other memory in a step counts no edit, as in eager PyTorch",
        "`weight.data = ...` in steps",
    ),
    "base_of": Name("_base", "What a tensor is a view of", _EVERYTHING, "torch.Tensor", _tensor),
    "creation_meta_of": Name(
        "torch._C._autograd._get_creation_meta",
        "A view made in no_grad mode is known for that, once it is real, too",
        "materializing views of weights",
    ),
    "set_creation_meta": Name("torch._C._autograd._set_creation_meta", "As above", "as above"),
    "backward_hooks": Name("_backward_hooks", "One with hooks is not replaced", "tracing", "torch.Tensor", _tensor),
    "post_accumulate_grad_hooks": Name("_post_accumulate_grad_hooks", "As above", "tracing", "torch.Tensor", _tensor),
    "parameter_flag": Name(
        PARAMETER_FLAG,
        "A tensor of another class is a parameter where this is set",
        "isinstance(deferred, Parameter)",
        "torch.Tensor",
    ),
    "use_count": Name(
        "_use_count", "Whether a graph holds a weight", "gradients of what a step returned", "torch.Tensor", _tensor
    ),
    "current_autograd_node": Name(
        "torch._C._current_autograd_node", "Which forward operation a backward one belongs to", "tracing backward()"
    ),
    "current_graph_task_id": Name(
        "torch._C._current_graph_task_id", "Whether backward() is under way", "use of a model that is still deferred"
    ),
    "storage_address": Name(
        "_cdata", "Tells storages apart", "tracing steps", "torch.UntypedStorage", lambda: torch.UntypedStorage(0)
    ),
    "storage_uses": Name(
        "torch._C._storage_Use_Count", "Whether anybody else holds a storage, which may then not be written", "tracing"
    ),
    "local_tensor": Name(
        "_local_tensor",
        "This rank's part, without autograd",
        "DTensor",
        "torch.distributed.tensor.DTensor",
    ),
    # -- modules and optimizers --
    "parameters_of": Name(
        "_parameters", "A module's table, None and all", _EVERYTHING, "torch.nn.Module", torch.nn.Module
    ),
    "buffers_of": Name("_buffers", "As above", _EVERYTHING, "torch.nn.Module", torch.nn.Module),
    "apply_of": Name(
        "_apply", "What Module.to_empty is made of", "Module.to_empty", "torch.nn.Module", torch.nn.Module
    ),
    "call_impl": Name(
        "torch.nn.Module._call_impl",
        "Modules leave out hooks with always_call=True while torch.compiler.is_compiling()",
        "hooks with always_call=True in steps",
    ),
    "input_check": Name(
        "_check_input_dim",
        "As BatchNorm.forward does",
        "BatchNorm(momentum=None) in steps",
        "torch.nn.BatchNorm1d",
        lambda: torch.nn.BatchNorm1d,
    ),
    "step_pre_hooks": Name(
        "_optimizer_step_pre_hooks",
        "Hooks are left out where state is made before the first step",
        "tracing steps",
        "torch.optim.Optimizer",
    ),
    "step_post_hooks": Name("_optimizer_step_post_hooks", "As above", "tracing steps", "torch.optim.Optimizer"),
    "global_step_pre_hooks": Name(
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "A step is traced again when hooks come or go",
        "tracing",
    ),
    "global_step_post_hooks": Name("torch.optim.optimizer._global_optimizer_post_hooks", "As above", "tracing"),
    "operation_handlers": Name(
        "_op_dispatcher._custom_op_handlers",
        "DTensor's table of operations gets ours",
        "initialising DTensors",
        "torch.distributed.tensor.DTensor",
    ),
}


def inner_overload(op: Any) -> Any:
    """The operation within what `torch.library.custom_op` returns; any other operation is returned as it is."""
    return getattr(op, "_opoverload", op)


# Settings of the process's, from torch.backends and its like: what gives each in torch._C, and what sets it.
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
    """Of PyTorch's settings that a step may ask for or set, how each is read and set; but for those that are gone."""
    module = _imported("C")
    pairs = [(getattr(module, read, None), getattr(module, write, None)) for read, write in _SETTINGS.items()]
    return [(read, write) for read, write in pairs if callable(read) and callable(write)]


def local_tensor_or(tensor: Any, otherwise: Any) -> Any:
    """This rank's part of a DTensor, without autograd; `otherwise` of any other tensor."""
    return getattr(tensor, "_local_tensor", otherwise)


def storage_use_count(storage: Any) -> int:
    """How many hold a storage, its Python object included."""
    return _imported("storage_uses")(_imported("storage_address")(storage))


def _imported(name: str) -> Any:
    return globals().get(name) or __getattr__(name)


def __getattr__(name: str) -> Any:
    row = NAMES.get(name)
    if row is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = resolve(row)
    return found
