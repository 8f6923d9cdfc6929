"""The traced functions of a run: forward and backward pass, update, and validation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

import firstloss as fl

from ..compat.torch_names import pytree
from ..errors import TrainerError
from ..runtime.pytrees import flatten, flattened_attributes
from .loops import TrainingLoop

if TYPE_CHECKING:
    from .precision import Precision


# What callbacks log in the step being traced, by name.
logged_in_step: ContextVar[dict[str, Any] | None] = ContextVar("logged_in_step", default=None)

_IN_STEP = (
    "on_before_forward",
    "on_after_forward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
    "on_before_scheduler_step",
    "on_after_scheduler_step",
    "on_before_optimizer_zero_grad",
    "on_after_optimizer_zero_grad",
)


class Steps:
    """The traced functions of a run, each compiled at its first call.

    `accumulate(batch)` adds to the gradients; `update(batch)` does so and updates the weights; both return the scalars
    among the model's outputs, including the loss. `evaluate(batch)` returns the same without gradients;
    `evaluate_all(batch)` also returns the other outputs, for metrics. `nan_weights()` returns for each weight whether
    it holds NaN, for processes that cannot read the weights. `schedules` are functions of a step tensor and step with
    the weights. `hooks(name, ...)` calls callbacks; hooks that no callback overrides are left out of the step.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | None,
        schedules: list[Any],
        loop: TrainingLoop | None,
        precision: Precision,
        hooks: Callable[..., None],
        overridden: Callable[[str], bool],
        trainer: Any,
    ) -> None:
        self._signature = inspect.signature(model.forward)
        self._model = model
        self._hooks = hooks
        self._trainer = trainer
        self.compiled: set[str] = set()  # names of the functions that have been called
        used = {name for name in _IN_STEP if overridden(name)}
        clip_norm = precision.clip_norm if loop is None or loop.clip_grad_norm is None else loop.clip_grad_norm
        clip_value = precision.clip_value if loop is None or loop.clip_grad_value is None else loop.clip_grad_value
        if clip_norm is not None and clip_value is not None:
            raise TrainerError(
                "loop and precision clip gradients, one by norm and one by value. Leave one of them out."
            )

        def hook(name: str, *args: Any) -> None:
            if name in used:
                hooks(name, trainer, model, *args)

        self._hook = hook

        def backward(batch: Any) -> dict[str, torch.Tensor]:
            assert loop is not None
            with precision.forward():
                loss, outputs = self._forward(batch)
                scaled = loss / loop.grad_accum_steps if loop.grad_accum_steps > 1 else loss
            hook("on_before_backward", outputs)
            precision.backward(scaled)
            hook("on_after_backward", outputs)
            return {"loss": loss.detach(), **_scalars(outputs)}

        def with_logged(step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            token = logged_in_step.set({})
            try:
                results = step()
                logged = logged_in_step.get()
                assert logged is not None
                return {**results, **logged}
            finally:
                logged_in_step.reset(token)

        @fl.trace
        def accumulate(batch: Any) -> dict[str, torch.Tensor]:
            return with_logged(lambda: backward(batch))

        @fl.trace
        def update(batch: Any) -> dict[str, torch.Tensor]:
            return with_logged(lambda: run_update(batch))

        def run_update(batch: Any) -> dict[str, torch.Tensor]:
            assert optimizer is not None
            results = backward(batch)
            precision.unscale(optimizer)
            hook("on_before_optimizer_step", optimizer)
            if clip_norm is not None:
                results["grad_norm"] = torch.nn.utils.clip_grad_norm_(_trained(optimizer), clip_norm)
            if clip_value is not None:
                torch.nn.utils.clip_grad_value_(_trained(optimizer), clip_value)
            scale = precision.scale()
            if scale is not None:
                results["loss_scale"] = scale
            precision.step(optimizer)
            hook("on_after_optimizer_step", optimizer)
            for schedule in schedules:
                hook("on_before_scheduler_step", optimizer, schedule)
                schedule.step()
                hook("on_after_scheduler_step", optimizer, schedule)
            hook("on_before_optimizer_zero_grad", optimizer)
            optimizer.zero_grad()
            hook("on_after_optimizer_zero_grad", optimizer)
            return results

        def run_evaluation(batch: Any) -> tuple[dict[str, Any], Any]:
            def step() -> dict[str, Any]:
                with torch.no_grad(), precision.forward():
                    loss, outputs[0] = self._forward(batch)
                return {"loss": loss, **_scalars(outputs[0])}

            outputs: list[Any] = [None]
            return with_logged(step), outputs[0]

        @fl.trace
        def evaluate(batch: Any) -> dict[str, Any]:
            return {"scalars": run_evaluation(batch)[0]}

        @fl.trace
        def evaluate_all(batch: Any) -> dict[str, Any]:
            scalars, outputs = run_evaluation(batch)
            return {"scalars": scalars, "outputs": _tensors(outputs)}

        @fl.trace
        def nan_weights() -> torch.Tensor:
            floats = [p.detach() for p in model.parameters() if p.is_floating_point()]
            return torch.stack([torch.isnan(p).any() for p in floats])

        self.accumulate: Callable[[Any], dict[str, torch.Tensor]] = accumulate
        self.update: Callable[[Any], dict[str, torch.Tensor]] = update
        self.evaluate: Callable[[Any], dict[str, Any]] = evaluate
        self.evaluate_all: Callable[[Any], dict[str, Any]] = evaluate_all
        self.nan_weights = nan_weights

    def run(self, name: str, batch: Any) -> Any:
        """Call a function by name; report its first call, which compiles it, to the callbacks."""
        function = getattr(self, name)
        if name in self.compiled:
            return function(on_device(batch))
        self._hooks("on_compile_start", self._trainer, name)
        outputs = function(on_device(batch))
        self.compiled.add(name)
        self._hooks("on_compile_end", self._trainer, name)
        return outputs

    def _forward(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Call the model with the batch as its `forward` takes it; returns the loss and all outputs."""
        args, kwargs = arguments(self._signature, batch)
        self._hook("on_before_forward", batch, args, kwargs)
        try:
            outputs = self._model(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            if not args or args[0] is not batch or isinstance(batch, torch.Tensor):
                raise
            # For example, forward(x) that returns logits fails on a list in `x`, which the user did not expect.
            raise TrainerError(
                f"forward{self._signature} does not take the elements of a batch {describe(batch)} as separate "
                f"arguments, so it was called with the whole batch, and failed: {error}. The model takes everything "
                "that its loss needs and returns the loss: def forward(self, x, y): return cross_entropy(self.net(x), "
                "y)."
            ) from error
        self._hook("on_after_forward", outputs, batch)
        return loss_of(outputs, self._model.__class__.__name__), outputs


def arguments(signature: inspect.Signature, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Match `batch` to the signature of a model's `forward`.

    A dict or dataclass is passed by names and a tuple or list as separate arguments, if the signature allows it, or
    else the batch as one argument.
    """
    candidates: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((batch,), {})]
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        candidates.insert(0, ((), dict(batch)))
    elif isinstance(batch, (tuple, list)):
        candidates.insert(0, (tuple(batch), {}))
    elif flattened_attributes(batch):
        candidates.insert(0, ((), {name: getattr(batch, name) for name in flattened_attributes(batch)}))
    for args, kwargs in candidates:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        return args, kwargs
    raise TrainerError(
        f"the model's forward{signature} does not accept the loader's batches, {describe(batch)}. A dict is passed by "
        "names, a tuple as separate arguments, anything else as one argument: change forward, or the loader's "
        "collate_fn."
    )


def loss_of(outputs: Any, model: str) -> torch.Tensor:
    """Find the loss in a model's outputs: the output itself, `.loss`, ["loss"], the only scalar or the first element.

    Hugging Face's models return tuples as (loss, logits), nanoGPT returns (logits, loss).
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
        f"{model}.forward returned {describe(outputs)}, which holds no loss. Return a scalar tensor, or a dict, "
        'a tuple or an object with the loss as ["loss"], only scalar or .loss. Hugging Face models compute it when the '
        "batch holds labels."
    )


def _is_scalar(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 0 and x.is_floating_point()


def _scalars(outputs: Any) -> dict[str, torch.Tensor]:
    """Scalar outputs other than the loss, which are logged, and averaged by validation."""
    if not isinstance(outputs, Mapping):
        return {}
    return {
        str(name): value.detach()
        for name, value in outputs.items()
        if name != "loss" and isinstance(value, torch.Tensor) and value.dim() == 0
    }


def _tensors(outputs: Any) -> Any:
    """The tensors among named outputs: Hugging Face models also return caches and the like."""
    if not isinstance(outputs, Mapping):
        return outputs
    return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def on_device(batch: Any) -> Any:
    """Move the batch to an eager backend's device; the XLA backend transfers it itself."""
    device = fl.current_torch_device()
    if device.type == "cpu":
        return batch
    leaves, spec = flatten(batch)
    moved = [leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(moved, spec)


def describe(value: Any) -> str:
    """Describe a batch or an output: its structure with the tensors' dtypes and shapes."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    if flattened_attributes(value):
        return type(value).__name__ + describe({name: getattr(value, name) for name in flattened_attributes(value)})
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(describe(item) for item in value) + ")"
    return type(value).__name__


def counts(batch: Any) -> tuple[int, int]:
    """(samples, tokens) of a batch: the first tensor's length, and the size of the first integer matrix."""
    tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    samples = next((len(t) for t in tensors if t.dim()), 1)
    tokens = next((t.numel() for t in tensors if t.dim() == 2 and not t.is_floating_point() and not t.is_complex()), 0)
    return samples, tokens
