"""Run a saved module, without PyTorch and without the model's code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ...compat.jax_names import compiler, ir, mlir, sdy, xla_client
from ...errors import ModuleTextError, ShardingError


class _Outputs(NamedTuple):
    """What a module says of its outputs; `specs` names the mesh axes that cut each of their dimensions."""

    axes: dict[str, int]
    names: list[str]
    shapes: list[tuple[int, ...]]
    specs: list[list[tuple[str, ...] | None]]

    def shardings(self, devices: list[jax.Device]) -> list[Any]:
        if not self.axes:
            return [SingleDeviceSharding(devices[0])] * len(self.names)
        mesh = Mesh(np.array(devices).reshape(tuple(self.axes.values())), tuple(self.axes))
        return [NamedSharding(mesh, PartitionSpec(*spec)) for spec in self.specs]


def run_stablehlo(path: str | os.PathLike, devices: Sequence[jax.Device] | None = None) -> dict[str, jax.Array]:
    """Run a module that `program.to_stablehlo` or `firstloss stablehlo` wrote: the weights by name.

    Examples:
        >>> program = fl.init_program(fl.deferred_init(nn.Linear, 8, 4))
        >>> with open("weights.mlir", "w") as file:
        ...     _ = file.write(program.to_stablehlo())
        >>> weights = fl.run_stablehlo("weights.mlir")
        >>> weights["bias"].shape
        (4,)

    Args:
        path: of the file.
        devices: in the mesh's order, as many as it has; default the first ones there are. Of several processes each
            makes the shards of its own devices.

    Returns:
        `{qualified name: jax.Array}`, each sharded over `devices` as the module says.

    Raises:
        ShardingError: if there are fewer devices than the module was written for, or one is given twice.
        ModuleTextError: if the file is no such module, or has been cut short.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    with mlir.make_ir_context():
        module = _parsed(path, text)
        outputs = _outputs_of(path, module)
        own = _enough(path, outputs.axes, devices)
        shards = _execute(module, own)
    return {
        name: jax.make_array_from_single_device_arrays(shape, sharding, parts)
        for name, shape, sharding, parts in zip(
            outputs.names, outputs.shapes, outputs.shardings(own), shards, strict=True
        )
    }


def _parsed(path: str | os.PathLike, text: str) -> Any:
    if not text.startswith("module @constructor "):
        raise _no_module(path)
    try:
        return ir.Module.parse(text)
    except ir.MLIRError as error:
        what = " ".join(str(error).split())
        raise ModuleTextError(f"{os.fspath(path)} is damaged or cut short: {what:.200}. Write it again") from None


def _no_module(path: str | os.PathLike) -> ModuleTextError:
    return ModuleTextError(f"{os.fspath(path)} is no module of weights. Write one with `firstloss stablehlo`")


def _outputs_of(path: str | os.PathLike, module: Any) -> _Outputs:
    operations = {op.attributes["sym_name"].value: op for op in module.body.operations}
    main = operations.get("main")
    if main is None or "res_attrs" not in main.attributes:
        raise _no_module(path)
    names = [ir.DictAttr(of)["jax.result_info"].value for of in ir.ArrayAttr(main.attributes["res_attrs"])]
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


def _enough(path: str | os.PathLike, axes: dict[str, int], devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """As many devices as the mesh has, all different."""
    count = int(np.prod(list(axes.values()), dtype=int))
    own = list(jax.devices() if devices is None else devices)
    if len(own) < count:
        sizes = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ShardingError(
            f"{os.fspath(path)} was written for a mesh of {count} devices ({sizes}), and there are {len(own)}. Write "
            "it again for a smaller mesh, or run it where there are as many"
        )
    own = own[:count]
    if len(set(own)) < count:
        raise ShardingError(f"{os.fspath(path)}: a device is given twice. Give {count} different ones")
    return own


def _execute(module: Any, devices: list[jax.Device]) -> list[list[jax.Array]]:
    """For each output the parts of this process' devices."""
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
