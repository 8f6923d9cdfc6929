"""`firstloss.load_step`: a training step from a file of `LoweredStep.save`, run by JAX, without PyTorch."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, CheckpointMissingError, ShapeError

MODULE = "firstloss.module."  # and a platform: the entry with the module for it
FORMAT = "firstloss.step"  # the metadata's key, whose value names the module's arguments and results


class ExportedStep:
    """A training step that needs only JAX.

    Attributes:
        name: that of the step's function.
        state: the arrays that the step changes, by name; new ones after each call.
        inputs: the other arrays by name, such as frozen weights.
        number: how many calls there were; with `seed` it determines random draws.
        seed: an int below 2**32.
    """

    def __init__(self, about: dict[str, Any], arrays: dict[str, jax.Array], module: jax.export.Exported) -> None:
        self.name: str = about["name"]
        self.state: dict[str, jax.Array] = {each["name"]: arrays[each["name"]] for each in about["state"]}
        inputs = about["inputs"]
        self.inputs: dict[str, jax.Array] = {a["name"]: arrays[a["name"]] for a in inputs if a["argument"] is None}
        self.number = 0
        self.seed = 0
        self._inputs = inputs
        self._leaves = {each["argument"]: each for each in inputs if each["argument"] is not None}
        self._call = jax.jit(module.call, donate_argnums=0)

    def __repr__(self) -> str:
        return f"<ExportedStep {self.name}: {len(self.state)} arrays of state, {len(self._leaves)} of a batch>"

    def __call__(self, *batch: Any) -> list[jax.Array]:
        """Run the step once, and replace `state`.

        Args:
            batch: the arrays among the step's arguments, in order, those in containers and keyword arguments after one
                another, each with the shape and dtype that the step was lowered for.

        Returns:
            The step's results in order, such as a loss.

        Raises:
            ShapeError: if the batch is not one that the step was lowered for.
        """
        self._check(batch)
        inputs = [
            self.inputs[each["name"]] if each["argument"] is None else np.asarray(batch[each["argument"]])
            for each in self._inputs
        ]
        with jax.enable_x64(True):
            seed = np.array([self.seed, self.number], np.uint32)
            state, results = self._call(list(self.state.values()), inputs, seed)
        self.state = dict(zip(self.state, state, strict=True))
        self.number += 1
        return results

    def _check(self, batch: tuple[Any, ...]) -> None:
        count = max(self._leaves, default=-1) + 1
        if len(batch) < count:
            raise ShapeError(
                f"{self.name} takes {count} arrays, but was given {len(batch)}. Pass a batch's arrays in order"
            )
        for number, each in self._leaves.items():
            given = np.asarray(batch[number])
            if list(given.shape) != each["shape"] or given.dtype != np.dtype(each["dtype"]):
                raise ShapeError(
                    f"{self.name}: array {number} of the batch is {given.dtype}{list(given.shape)}, but the step was "
                    f"lowered for {each['dtype']}{each['shape']}. Convert it, or lower the step for such batches"
                )


def _platform() -> str:
    """The platform of JAX's default device, as modules are lowered for it."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version else "cuda"


def load_step(path: str | os.PathLike[str]) -> ExportedStep:
    """Load a step that `step.lower(batch).save(path)` wrote. Neither PyTorch nor the model's code is imported.

    Args:
        path: of the file.

    Returns:
        The step, with the state that it was saved with: `loss, = step(inputs, labels)` runs it.

    Raises:
        CheckpointMissingError: if there is no such file.
        CheckpointError: if it is not such a step, has no module for JAX's default device, or is damaged.
    """
    name = os.fspath(path)
    try:
        with safe_open(path, "flax") as file, jax.enable_x64(True):
            described = (file.metadata() or {}).get(FORMAT)
            if described is None:
                raise CheckpointError(f"{name} has no step. Write one with step.lower(batch).save(path)")
            arrays = {key: file.get_tensor(key) for key in file.keys()}
        about, platform = json.loads(described), _platform()
        if platform not in about["sha256"]:
            there = ", ".join(about["sha256"])
            raise CheckpointError(f"{name} has no module for {platform}, but for {there}. Pass platforms= to save")
        module = np.asarray(arrays[MODULE + platform]).tobytes()
        if hashlib.sha256(module).hexdigest() != about["sha256"][platform]:  # XLA may crash on what it has not written
            raise CheckpointError(f"{name} is damaged: its module is not as it was written. Write it again")
        return ExportedStep(about, arrays, jax.export.deserialize(bytearray(module)))
    except FileNotFoundError as error:
        raise CheckpointMissingError(f"there is no file {name}") from error
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise CheckpointError(f"{name} is damaged: {' '.join(str(error).split())[:200]}. Write it again") from error
