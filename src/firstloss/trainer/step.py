"""What is traced: a batch through the model and back, the update, and a batch of validation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

import firstloss as fl

from ..compat.torch_names import pytree
from ..errors import TrainerError
from .loops import TrainingLoop, ValidationLoop

if TYPE_CHECKING:
    from .precision import Precision


class Steps:
    """The functions of a run. Each is traced and compiled once, at its first call.

    `accumulate(batch)` adds to the gradients; `update(batch)` does so and updates the weights; both return the scalars
    that the model returned, the loss among them. `evaluate(batch)` returns the same without gradients, and whatever
    else the model returned where there are metrics to be fed. `nan_weights()` says of each weight whether it holds NaN,
    for processes that cannot read them. `schedules` are functions of a step tensor, and step with the weights.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | None,
        schedules: list[Any],
        loop: TrainingLoop | None,
        validation: ValidationLoop,
        precision: Precision,
    ) -> None:
        self._signature = inspect.signature(model.forward)
        self._model = model
        self.compiled: set[str] = set()  # the names of those that have been called

        def backward(batch: Any) -> dict[str, torch.Tensor]:
            assert loop is not None
            with precision.forward():
                loss, outputs = self._forward(batch)
                share = loss / loop.grad_accum_steps if loop.grad_accum_steps > 1 else loss
            precision.backward(share)
            return {"loss": loss.detach(), **_scalars(outputs)}

        @fl.trace
        def accumulate(batch: Any) -> dict[str, torch.Tensor]:
            return backward(batch)

        @fl.trace
        def update(batch: Any) -> dict[str, torch.Tensor]:
            assert optimizer is not None and loop is not None
            found = backward(batch)
            precision.unscale(optimizer)
            if loop.clip_grad_norm is not None:
                found["grad_norm"] = torch.nn.utils.clip_grad_norm_(_trained(optimizer), loop.clip_grad_norm)
            if loop.clip_grad_value is not None:
                torch.nn.utils.clip_grad_value_(_trained(optimizer), loop.clip_grad_value)
            precision.step(optimizer)
            for schedule in schedules:
                schedule.step()
            optimizer.zero_grad()
            return found

        @fl.trace
        def evaluate(batch: Any) -> dict[str, Any]:
            with torch.no_grad(), precision.forward():
                loss, outputs = self._forward(batch)
            everything = {"outputs": _tensors(outputs)} if validation.metrics else {}
            return {"scalars": {"loss": loss, **_scalars(outputs)}, **everything}

        @fl.trace
        def nan_weights() -> torch.Tensor:
            floats = [p.detach() for p in model.parameters() if p.is_floating_point()]
            return torch.stack([torch.isnan(p).any() for p in floats])

        self.accumulate, self.update, self.evaluate = accumulate, update, evaluate
        self.nan_weights = nan_weights

    def _forward(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Give the batch to the model in the way its `forward` asks for; returns the loss and all that came out."""
        args, kwargs = arguments(self._signature, batch)
        try:
            outputs = self._model(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            if not args or args[0] is not batch or isinstance(batch, torch.Tensor):
                raise
            # As a forward(x) that returns logits: the user finds a list in `x`, and never asked for one.
            raise TrainerError(
                f"forward{self._signature} does not take the parts of a batch {describe(batch)} one by one, so it was "
                f"given the batch whole, and failed: {error}. A model is given all that its loss needs, and returns "
                "the loss: def forward(self, x, y): return cross_entropy(self.net(x), y)."
            ) from error
        return loss_of(outputs, self._model.__class__.__name__), outputs


def arguments(signature: inspect.Signature, batch: Any) -> tuple[tuple, dict[str, Any]]:
    """How `batch` fits a model's `forward`: a dict by names, a tuple or list one by one, or the batch as one argument.

    The first of these that the signature takes is the one.
    """
    ways: list[tuple[tuple, dict[str, Any]]] = [((batch,), {})]
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        ways.insert(0, ((), dict(batch)))
    elif isinstance(batch, (tuple, list)):
        ways.insert(0, (tuple(batch), {}))
    for args, kwargs in ways:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        return args, kwargs
    raise TrainerError(
        f"the model's forward{signature} does not take what the loader gives, {describe(batch)}. A dict is passed by "
        "names, a tuple one by one, anything else as one argument: change forward, or the loader's collate_fn."
    )


def loss_of(outputs: Any, model: str) -> torch.Tensor:
    """The loss in what a model returned: itself, its `loss`, its ["loss"], its first element, or the only scalar in it.

    (loss, logits) is how Hugging Face's models return tuples, (logits, loss) how nanoGPT does.
    """
    loss = outputs
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif hasattr(outputs, "loss"):
        loss = outputs.loss
    elif isinstance(outputs, (tuple, list)) and outputs:
        scalars = [x for x in outputs if _is_scalar(x)]
        loss = scalars[0] if len(scalars) == 1 else outputs[0]
    if _is_scalar(loss):
        return loss
    raise TrainerError(
        f"{model}.forward returned {describe(outputs)}, in which there is no loss. Return a scalar tensor, or a dict, "
        'a tuple or an object with the loss as ["loss"], only scalar or .loss. A Hugging Face model computes it '
        "when the batch holds labels."
    )


def _is_scalar(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 0 and x.is_floating_point()


def _scalars(outputs: Any) -> dict[str, torch.Tensor]:
    """What else a model returned by name that is one number: it is averaged and logged."""
    if not isinstance(outputs, Mapping):
        return {}
    return {
        str(name): value.detach()
        for name, value in outputs.items()
        if name != "loss" and isinstance(value, torch.Tensor) and value.dim() == 0
    }


def _tensors(outputs: Any) -> Any:
    """Of what came out by name, the tensors: Hugging Face models return caches and the like besides."""
    if not isinstance(outputs, Mapping):
        return outputs
    return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def on_device(batch: Any) -> Any:
    """The batch where an eager backend computes; the XLA backend takes it from where it is."""
    device = fl.current_torch_device()
    if device.type == "cpu":
        return batch
    return pytree.tree_map(lambda x: x.to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x, batch)


def describe(thing: Any) -> str:
    """A batch or an output in words: its structure with the tensors' dtypes and shapes."""
    if isinstance(thing, torch.Tensor):
        return f"{str(thing.dtype).removeprefix('torch.')}{list(thing.shape)}"
    if isinstance(thing, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in thing.items()) + "}"
    if isinstance(thing, (tuple, list)):
        return "(" + ", ".join(describe(value) for value in thing) + ")"
    return type(thing).__name__


def counts(batch: Any) -> tuple[int, int]:
    """(samples, tokens) of a batch: the first tensor's length, and the size of the first whole-number matrix."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    samples = next((len(t) for t in tensors if t.dim()), 1)
    tokens = next((t.numel() for t in tensors if t.dim() == 2 and not t.is_floating_point() and not t.is_complex()), 0)
    return samples, tokens
