"""`firstloss.init_program`: the captured Program of a module, and its weights on devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..capture.deferred import deferred_init, named_tensors
from ..capture.op_call import ref_of
from ..capture.tensor import DeferredTensor, on_backend
from ..compat.torch_names import InferenceMode
from ..dependencies import require_jax
from ..errors import NothingDeferredError, SaveError
from ..files import atomic_write
from ..program.graph import Value
from .recipes import Recipe, Recipes
from .shardings import mark_of

if TYPE_CHECKING:
    import jax

    from .stablehlo.plan import ShardingPlan


class InitProgram(Recipes):
    """The captured Program of a module: a recipe for each of its weights.

    Attributes:
        recipes: by qualified name. A tied weight has its recipe under each of its names.
        without: weights that cannot have a recipe, such as sparse ones, with a description of each.
    """

    def plan(self, mesh: Any = None, shardings: Mapping[str, Any] | None = None) -> ShardingPlan:
        """The sharding of each weight, and the work of each device; arguments as for `run`."""
        require_jax("InitProgram.plan")
        from .stablehlo.plan import plan

        return plan(self, mesh, shardings)

    def to_stablehlo(self, mesh: Any = None, shardings: Mapping[str, Any] | None = None) -> str:
        """The text of one StableHLO module whose outputs are the weights; each device computes its own shards.

        Outputs have the names of the weights (`jax.result_info`), in sorted order, tied weights once, and Shardy
        annotations. The module has no inputs and needs no communication. Arguments as for `run`; the mesh may have more
        devices than are available.

        Raises:
            ShardingError: as `run`.
            LoweringError: if a weight cannot be computed on a device; names the weight.
        """
        require_jax("InitProgram.to_stablehlo")
        from .stablehlo.module import to_stablehlo

        return to_stablehlo(self, mesh, shardings)

    as_text = to_stablehlo  # the word of JAX, and of a lowered step

    def compile(self, mesh: Any = None, shardings: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
        """The module of `to_stablehlo`, compiled as a whole for the devices here; `run` compiles less, in parallel.

        Arguments and errors as for `to_stablehlo`.

        Returns:
            JAX's object for it: called without arguments it returns `{name: jax.Array}`, tied weights once;
            `memory_analysis()`, `cost_analysis()` and `as_text()` are the compiler's.
        """
        require_jax("InitProgram.compile")
        from .stablehlo.devices import compile

        return compile(self, mesh, shardings)

    def save(self, path: str | os.PathLike[str], mesh: Any = None, shardings: Mapping[str, Any] | None = None) -> None:
        """Write the module to a file, which `fl.run_stablehlo` runs without PyTorch and without the model's code.

        Arguments and errors as for `to_stablehlo`, and SaveError if the file cannot be written, which is replaced as a
        whole.
        """
        text = self.to_stablehlo(mesh, shardings)
        try:
            with atomic_write(path) as file:
                file.write(text.encode())
        except OSError as error:
            raise SaveError(f"{os.fspath(path)} cannot be written: {error.strerror or error}") from error

    def peak_bytes(self, mesh: Any = None, shardings: Mapping[str, Any] | None = None) -> dict[str, int]:
        """The bytes that each device needs to compute its shards, by the executables' memory analysis.

        Compiles for the available devices, and runs nothing. Arguments and errors as for `run`.

        Returns:
            "weights", for the results, and "temporary", the maximum of any executable's temporary memory.
        """
        require_jax("InitProgram.peak_bytes")
        from .stablehlo.devices import peak_bytes

        return peak_bytes(self, mesh, shardings)

    def run(
        self, mesh: Any = None, shardings: Mapping[str, Any] | None = None, *, engine: str | None = None
    ) -> dict[str, Any]:
        """The weights as `{name: jax.Array}`; each device computes its own shards, and tied weights are one array.

        Args:
            mesh: a `jax.sharding.Mesh`, or the sizes of its axes by name, such as `{"fsdp": 8}`. None: the mesh of the
                annotations of `fl.shard`, or one device.
            shardings: specs by name pattern; a weight that no pattern matches is replicated. None: the annotations of
                `fl.shard` and `fl.mark_sharding`, or, without any, each weight's largest divisible dimension is sharded
                over all data axes.
            engine: "torch" computes the shards with PyTorch's kernels in the memory of CPU devices, bit-identical to
                eager; "xla" runs compiled recipes on the devices. Default: "torch" on a CPU, else "xla".

        Raises:
            ShardingError: if a spec names an unknown axis, or does not fit its weight, if a pattern matches nothing, or
                if the mesh has more devices than are available. Nothing is computed then.
        """
        require_jax("InitProgram.run")
        from .stablehlo.devices import run

        with InferenceMode(False):
            return run(self, mesh, shardings, engine)


def init_program(module: torch.nn.Module) -> InitProgram:
    """The captured Program of `module`: a recipe for each of its weights. Computes nothing.

    Parameters and buffers that are already real, such as those created from NumPy arrays, are constants with their
    current values; weights on a backend are omitted.

    Examples:
        >>> program = fl.init_program(fl.deferred_init(nn.Linear, 8, 4))
        >>> list(program.recipes)
        ['weight', 'bias']
        >>> print(program.report())  # doctest: +ELLIPSIS
        weight ...

    Args:
        module: a Module, some of whose parameters and buffers are deferred.

    Returns:
        The Program of its constructor, with `recipes` by qualified name.

    Raises:
        NothingDeferredError: if no parameter, buffer or tensor attribute of `module` is deferred.
    """
    if not isinstance(module, torch.nn.Module):
        raise NothingDeferredError(f"init_program: {module!r:.80} is not a Module. Only a Module has named weights.")
    recipes: dict[str, Recipe] = {}
    first: dict[int, Recipe] = {}
    counted: set[int] = set()
    present: list[tuple[str, torch.Tensor, str]] = []
    others: dict[str, str] = {}
    for name, tensor, kind in named_tensors(module):
        if type(tensor) is not DeferredTensor:
            if kind != "attribute" and _is_plain(tensor):
                present.append((name, tensor, kind))
            elif kind != "attribute":
                others[name] = _kind(tensor)
            continue
        if on_backend(tensor):
            continue
        recipe = first.get(id(tensor))
        if recipe is None:
            storage = tensor._storage
            dead = 0 if id(storage) in counted else storage.fills - _ends_in_a_fill(storage.value)
            counted.add(id(storage))
            recipe = first[id(tensor)] = Recipe(name, tensor._ref(), kind, dead, mark=mark_of(tensor))
        elif kind == "attribute":  # a list of weights, as in nn.LSTM, is not another name
            continue
        else:
            recipe.aliases.append(name)
        recipes[name] = recipe
    if not recipes:
        raise NothingDeferredError(
            f"init_program: this {type(module).__name__} has no deferred weight. Construct it with "
            "firstloss.deferred_init, and call init_program before it is materialized."
        )
    for name, tensor, kind in present:  # weights in memory are constants
        recipe = first.get(id(tensor))
        if recipe is None:
            recipe = first[id(tensor)] = Recipe(name, ref_of(tensor), kind, 0, mark=mark_of(tensor))
        else:
            recipe.aliases.append(name)
        recipes[name] = recipe
    return InitProgram(recipes, others)


def lower(fn: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> InitProgram:
    """Capture `fn(*args, **kwargs)` as one Program, to read, plan, compile and save like a step of `step.lower(batch)`.

    It is `fl.init_program(fl.deferred_init(fn, *args, **kwargs))`.

    Examples:
        >>> lowered = fl.lower(nn.Linear, 8, 4)
        >>> lowered.compile()()["weight"].shape
        (4, 8)

    Args:
        fn: a constructor: any callable that returns a Module.
        *args, **kwargs: its arguments.

    Returns:
        The Program of the constructor: `program`, `plan()`, `as_text()`, `compile()`, `run()` and `save()`.

    Raises:
        NothingDeferredError: if the result is no Module, or has no weights, or if `fn` is a module instance.
    """
    return init_program(deferred_init(fn, *args, **kwargs))


def _kind(tensor: torch.Tensor) -> str:
    """A description of a tensor that cannot have a recipe."""
    name = "" if type(tensor) in (torch.Tensor, torch.nn.Parameter) else f"{type(tensor).__name__}, "
    return f"{name}{str(tensor.layout).removeprefix('torch.')}, {tensor.dtype}, on {tensor.device}"


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a real tensor can be a constant: strided, and not a subclass."""
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return known and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta


def _ends_in_a_fill(value: Value) -> bool:
    """Whether the content depends on a fill of the whole storage, which is then not dead."""
    node = value.node
    while node is not None and node.writes and not value.known:
        if node.overwrites:
            return True
        written = [ref.value for ref, out in zip(node.writes, node.outputs, strict=False) if out is value]
        if not written:  # recreated, by an operation that writes to something else
            return False
        node = (value := written[0]).node
    return False
