"""Select the tensors of a module to save, and their names, like transformers' `save_pretrained`."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, NamedTuple

import torch

from ...capture.tensor import DeferredTensor, on_backend
from ...errors import SaveError
from ...program.graph import Ref, Value, is_contiguous
from .savable import check_savable, memory_key


class SavedTensor(NamedTuple):
    """A tensor to save; `ref` is contiguous."""

    name: str
    ref: Ref

    @property
    def nbytes(self) -> int:
        count = self.ref.dtype.itemsize
        for size in self.ref.size:
            count *= size
        return count


def tensors_to_save(module: torch.nn.Module) -> tuple[list[SavedTensor], dict[str, str]]:
    """The tensors in the order of the state dict, and {omitted name: name of the tensor that it is tied to}."""
    state = dict(module.state_dict())
    for name in getattr(module, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    for name, tensor in state.items():
        _check(name, tensor)
    omitted = _ties(state, _declared_ties(module))
    for name in omitted:
        if name == "format":  # reserved in the metadata, which list omitted names
            raise _misnamed(name)
        del state[name]
    state = _revert_conversion(module, state)
    return [SavedTensor(name, _contiguous_ref(tensor)) for name, tensor in state.items()], omitted


def write_configs(module: Any, folder: str) -> None:
    """Write the other files that `from_pretrained` needs, if any: config.json, generation_config.json."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    if hasattr(module, "dtype") and "transformers" in sys.modules:
        config.dtype = str(module.dtype).removeprefix("torch.")
        config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "save_pretrained") and module.can_generate():
        generation.save_pretrained(folder)


def config_names(folder: str) -> list[str]:
    """The names of the files that `write_configs` has written."""
    return sorted(name for name in os.listdir(folder) if name.endswith(".json") and ".safetensors." not in name)


def _misnamed(name: str) -> SaveError:
    return SaveError(
        f"a safetensors file cannot hold a tensor named {name!r}, which is reserved. Rename the weight, or materialize "
        "the module and save it with torch.save or firstloss.save."
    )


def _check(name: str, tensor: Any) -> None:
    if name == "__metadata__":
        raise _misnamed(name)
    if not isinstance(tensor, torch.Tensor):
        raise SaveError(
            f"{name} of the state dict is of type {type(tensor).__name__}, but a safetensors file holds only tensors. "
            "Materialize the module and save it with torch.save."
        )
    check_savable(
        tensor,
        name,
        SaveError,
        "Call save_initialized before the module is distributed, or materialize it and use "
        "torch.distributed.checkpoint.",
    )


def _declared_ties(module: torch.nn.Module) -> list[re.Pattern[str]]:
    """Patterns of the names that transformers ties to others when it loads a model."""
    patterns = []
    for prefix, sub in module.named_modules():
        for key in getattr(sub, "_tied_weights_keys", None) or ():
            patterns.append(re.compile(f"{prefix}.{key}" if prefix else key))
    return patterns


def _ties(state: dict[str, torch.Tensor], declared: list[re.Pattern[str]]) -> dict[str, str]:
    """Tied names to omit, each with the name to save: the first of its group that is not declared as tied."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        if tensor.numel():
            groups.setdefault(memory_key(tensor), []).append(name)
    omitted = {}
    for names in groups.values():
        undeclared = [name for name in sorted(names) if not any(pattern.search(name) for pattern in declared)]
        saved = next((name for name in names if name in undeclared), sorted(names)[-1])
        omitted.update({name: saved for name in names if name != saved})
    return omitted


def _revert_conversion(module: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Revert transformers' conversion of checkpoints on loading (fused experts, new names)."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        return state
    revert = getattr(modeling, "revert_weight_conversion", None)
    return state if revert is None else revert(module, state)


def _contiguous_ref(tensor: torch.Tensor) -> Ref:
    with torch.no_grad():
        if on_backend(tensor):
            tensor = tensor._ref().view(tensor._storage.resident.host())
        # For a deferred tensor, `contiguous` adds an operation to its recipe.
        tensor = tensor.detach()
        if not is_contiguous(tensor.shape, tensor.stride()):
            tensor = tensor.contiguous()
    if type(tensor) is DeferredTensor:
        return tensor._ref()
    tensor = tensor.resolve_conj().resolve_neg()
    shape = tuple(tensor.shape)
    value = Value(shape, tensor.contiguous().stride(), tensor.dtype, tensor.device)
    value.real = tensor
    return Ref(value, shape, value.stride, 0, tensor.dtype)
