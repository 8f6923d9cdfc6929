"""Run a saved StableHLO module, without PyTorch and without the model's code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ...compat.jax_names import compiler, ir, mlir, sdy, xla_client
from ...errors import ModuleTextError, ShardingError
from .checksum import is_whole


class _Outputs(NamedTuple):
    """The outputs of a module; `specs` has the mesh axes that shard each of their dimensions."""

    axes: dict[str, int]
    names: list[str]
    shapes: list[tuple[int, ...]]
    specs: list[list[tuple[str, ...] | None]]

    def shardings(self, devices: list[jax.Device]) -> list[Any]:
        if not self.axes:
            return [SingleDeviceSharding(devices[0])] * len(self.names)
        mesh = Mesh(np.array(devices).reshape(tuple(self.axes.values())), tuple(self.axes))
        return [NamedSharding(mesh, PartitionSpec(*spec)) for spec in self.specs]


def run_stablehlo(path: str | os.PathLike[str], devices: Sequence[Any] | None = None) -> dict[str, jax.Array]:
    """Run a module written by `program.to_stablehlo` or `firstloss stablehlo`, and return its weights.

    Examples:
        >>> program = fl.init_program(fl.deferred_init(nn.Linear, 8, 4))
        >>> with open("weights.mlir", "w") as file:
        ...     _ = file.write(program.to_stablehlo())
        >>> weights = fl.run_stablehlo("weights.mlir")
        >>> weights["bias"].shape
        (4,)

    Args:
        path: the path of the file.
        devices: as many as the mesh has, in its order; defaults to the first ones. With several processes, each one
            computes the shards of its own devices.

    Returns:
        `{qualified name: jax.Array}`, each sharded over `devices` as specified in the module.

    Raises:
        ShardingError: if there are fewer devices than the module was written for, or one is given twice.
        ModuleTextError: if the file is not such a module, or is not as it was written.
    """
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    with mlir.make_ir_context():
        module = _parsed(path, text)
        try:
            outputs = _outputs_of(path, module)
        except (KeyError, ValueError, TypeError, AttributeError) as error:  # not what `to_stablehlo` writes
            raise _no_module(path) from error
        selected = _select_devices(path, outputs.axes, devices)
        shards = _execute(module, selected)
    return {
        name: jax.make_array_from_single_device_arrays(shape, sharding, parts)
        for name, shape, sharding, parts in zip(
            outputs.names, outputs.shapes, outputs.shardings(selected), shards, strict=True
        )
    }


def _parsed(path: str | os.PathLike[str], text: str) -> Any:
    if not text.startswith("module @constructor "):
        raise _no_module(path)
    if not is_whole(text):
        raise ModuleTextError(
            f"{os.fspath(path)} is damaged or truncated, or was edited: its last line is not the checksum of the "
            "others. Write it again"
        )
    try:
        return ir.Module.parse(text)
    except ir.MLIRError as error:
        reason = " ".join(str(error).split())
        raise ModuleTextError(f"{os.fspath(path)} is damaged or truncated: {reason:.200}. Write it again") from None


def _no_module(path: str | os.PathLike[str]) -> ModuleTextError:
    return ModuleTextError(f"{os.fspath(path)} is not a module of weights. Write one with `firstloss stablehlo`")


def _outputs_of(path: str | os.PathLike[str], module: Any) -> _Outputs:
    operations = {op.attributes["sym_name"].value: op for op in module.body.operations}
    main = operations.get("main")
    if main is None or "res_attrs" not in main.attributes:
        raise _no_module(path)
    names = [
        ir.DictAttr(attributes)["jax.result_info"].value for attributes in ir.ArrayAttr(main.attributes["res_attrs"])
    ]
    shapes = [tuple(result.shape) for result in main.type.results]
    mesh = operations.get("mesh")
    if mesh is None:
        return _Outputs({}, names, shapes, [])
    axes = {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(mesh.attributes["mesh"]).axes)}
    body = main.body.blocks[0].operations
    manual = next((op for op in body if op.operation.name == "sdy.manual_computation"), None)
    if manual is None:
        raise _no_module(path)
    shardings = sdy.TensorShardingPerValueAttr(manual.attributes["out_shardings"]).shardings
    return _Outputs(axes, names, shapes, [_spec(sdy.TensorShardingAttr(sharding)) for sharding in shardings])


def _spec(sharding: Any) -> list[tuple[str, ...] | None]:
    cuts = [sdy.DimensionShardingAttr(cut).axes for cut in sharding.dimension_shardings]
    return [tuple(sdy.AxisRefAttr(axis).name for axis in axes) or None for axes in cuts]


def _select_devices(
    path: str | os.PathLike[str], axes: dict[str, int], devices: Sequence[Any] | None
) -> list[jax.Device]:
    """As many distinct devices as the mesh has."""
    count = int(np.prod(list(axes.values()), dtype=int))
    selected = list(jax.devices() if devices is None else devices)
    if len(selected) < count:
        sizes = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ShardingError(
            f"{os.fspath(path)} was written for a mesh of {count} devices ({sizes}), but there are {len(selected)}. "
            "Write it again for a smaller mesh, or run it on as many devices"
        )
    selected = selected[:count]
    if len(set(selected)) < count:
        raise ShardingError(f"{os.fspath(path)}: a device is given twice. Pass {count} different ones")
    return selected


def _execute(module: Any, devices: list[jax.Device]) -> list[list[jax.Array]]:
    """The shards of each output on this process's devices."""
    client = devices[0].client
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        backend=client,
    )
    executable = compiler.backend_compile_and_load(
        client, module, xla_client.DeviceList(tuple(devices)), options, host_callbacks=[]
    )
    results = executable.execute_sharded([])
    return results.disassemble_into_single_device_arrays()
