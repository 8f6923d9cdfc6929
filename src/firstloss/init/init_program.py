"""`firstloss.init_program`: the Program captured of a module, and its weights on devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..capture.constants import ref_of
from ..capture.deferred import named_tensors
from ..capture.tensor import DeferredTensor, on_backend
from ..dependencies import require_jax
from ..errors import NothingDeferredError
from ..program.graph import Value
from .recipes import Recipe, Recipes
from .shardings import mark_of

if TYPE_CHECKING:
    from .stablehlo.plan import ShardingPlan


class InitProgram(Recipes):
    """What was captured of a module: a recipe for each of its weights.

    Attributes:
        recipes: by qualified name. A weight that has several names has its recipe under each.
        without: weights that can have none, such as sparse ones, each with its kind in words.
    """

    def plan(self, mesh: Any = None, shardings: Mapping[str, Any] | None = None) -> ShardingPlan:
        """The sharding of each weight, and what each device does; arguments as for `run`."""
        require_jax("InitProgram.plan")
        from .stablehlo.plan import plan

        return plan(self, mesh, shardings)

    def to_stablehlo(self, mesh: Any = None, shardings: Mapping[str, Any] | None = None) -> str:
        """The text of one StableHLO module whose outputs are the weights, each device making its own part of them.

        Outputs are named (`jax.result_info`) as the weights are, in the order of their names, a tied weight once, and
        have Shardy annotations. The module needs no input and no communication. Arguments as for `run`; the mesh may
        have more devices than there are.

        Raises:
            ShardingError: as `run`.
            LoweringError: if a weight cannot be made on a device; it is named.
        """
        require_jax("InitProgram.to_stablehlo")
        from .stablehlo.module import to_stablehlo

        return to_stablehlo(self, mesh, shardings)

    def peak_bytes(self, mesh: Any = None, shardings: Mapping[str, Any] | None = None) -> dict[str, int]:
        """Bytes that each device needs to make its shards by compiled recipes, by the executables' own analysis.

        Compiles them for devices that are there, and makes nothing. Arguments and errors as for `run`.

        Returns:
            "weights", which stay, and "temporary", the most that any one executable has beside what it makes.
        """
        require_jax("InitProgram.peak_bytes")
        from .stablehlo.devices import peak_bytes

        return peak_bytes(self, mesh, shardings)

    def run(
        self, mesh: Any = None, shardings: Mapping[str, Any] | None = None, *, engine: str | None = None
    ) -> dict[str, Any]:
        """The weights as `{name: jax.Array}`, each device making its own shards; tied weights are one array.

        Args:
            mesh: a `jax.sharding.Mesh`, or the sizes of its axes by name, as `{"fsdp": 8}`. None: the mesh of the
                marks that `fl.shard` left, or one device.
            shardings: specs by name pattern; a weight that no pattern matches is replicated. None: what
                `fl.shard` and `fl.mark_sharding` said, or, if they said nothing, each weight's largest dimension that
                divides is cut over all data axes.
            engine: "torch" makes the shards with PyTorch's kernels in memory that CPU devices own, bit for bit as
                eager; "xla" runs compiled recipes on the devices. Default: "torch" on a CPU, "xla" elsewhere.

        Raises:
            ShardingError: if a spec names an axis that there is not, or does not fit its weight, if a pattern matches
                nothing, or if the mesh has more devices than there are. Nothing has been made then.
        """
        require_jax("InitProgram.run")
        from .stablehlo.devices import run

        return run(self, mesh, shardings, engine)


def init_program(module: torch.nn.Module) -> InitProgram:
    """What was captured of `module`: a recipe for each of its weights; computes nothing.

    Parameters and buffers that are real already, as those made of numpy arrays are, are constants of it, as they are
    now; weights that live on a backend are left out.

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
        raise NothingDeferredError(f"init_program: {module!r:.80} is no Module. Only a Module has named weights.")
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
        elif kind == "attribute":  # a list kept beside the weights, as an LSTM's: not a name of its own
            continue
        else:
            recipe.aliases.append(name)
        recipes[name] = recipe
    if not recipes:
        raise NothingDeferredError(
            f"init_program: this {type(module).__name__} has no deferred weight. Construct it with "
            "firstloss.deferred_init, and look before it is materialized."
        )
    for name, tensor, kind in present:  # weights that are in memory already are written down as they are
        recipe = first.get(id(tensor))
        if recipe is None:
            recipe = first[id(tensor)] = Recipe(name, ref_of(tensor), kind, 0, mark=mark_of(tensor))
        else:
            recipe.aliases.append(name)
        recipes[name] = recipe
    return InitProgram(recipes, others)


def _kind(tensor: torch.Tensor) -> str:
    """In words, what kind of tensor has no recipe."""
    name = "" if type(tensor) in (torch.Tensor, torch.nn.Parameter) else f"{type(tensor).__name__}, "
    return f"{name}{str(tensor.layout).removeprefix('torch.')}, {tensor.dtype}, on {tensor.device}"


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a real tensor has values that can be written down: not one of a subclass with a layout of its own."""
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return known and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta


def _ends_in_a_fill(value: Value) -> bool:
    """Whether the content goes back to a fill of the whole storage: the one that is not dead."""
    node = value.node
    while node is not None and node.writes and not value.known:
        if node.overwrites:
            return True
        written = [ref.value for ref, out in zip(node.writes, node.outputs, strict=False) if out is value]
        if not written:  # recreated, by an operation that writes to something else
            return False
        node = (value := written[0]).node
    return False
