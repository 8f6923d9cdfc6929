"""Run a written module: without PyTorch, and without the model's code."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ...compat.jax_names import ir
from ...errors import ModuleTextError, ShardingError

_MESH = re.compile(r"sdy\.mesh @mesh = <\[([^\]]*)\]>")
_AXIS = re.compile(r'"([^"]+)"=(\d+)')
_OUT = re.compile(r"sdy\.manual_computation\(.*?\) in_shardings=\[.*?\] out_shardings=\[(.*?)\] manual_axes", re.DOTALL)
_ONE = re.compile(r"<@mesh, \[((?:\{[^}]*\}(?:, )?)*)\]>")
_ESCAPED = re.compile(r"\\\\|(?:\\[0-9A-F]{2})+")
_NAME = re.compile(r'jax\.result_info = "((?:[^"\\]|\\.)*)"')


def run_stablehlo(path: str | os.PathLike, devices: Sequence[jax.Device] | None = None) -> dict[str, jax.Array]:
    """Run a module that `program.to_stablehlo` or `firstloss stablehlo` wrote: the weights by name.

    Args:
        devices: in the mesh's order, as many as it has; default the first ones there are. Of several processes each
            makes the shards of its own devices.

    Raises:
        ShardingError: if there are fewer devices than the module was written for, or one is given twice.
        ModuleTextError: if the file is no such module, or has been cut short.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    if not text.startswith("module @constructor ") or "func.func public @main(" not in text:
        raise ModuleTextError(f"{os.fspath(path)} is no module of weights. Write one with `firstloss stablehlo`")
    axes = {name: int(size) for name, size in _AXIS.findall(found[1])} if (found := _MESH.search(text)) else {}
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
    try:
        shards = _execute(text, own)
    except ir.MLIRError as error:
        what = " ".join(str(error).split())
        raise ModuleTextError(f"{os.fspath(path)} is damaged or cut short: {what:.200}. Write it again") from None
    names, shapes = _outputs(text)
    shardings = _shardings(text, axes, own, len(names))
    return {
        name: jax.make_array_from_single_device_arrays(shape, sharding, parts)
        for name, shape, sharding, parts in zip(names, shapes, shardings, shards, strict=True)
    }


def _outputs(text: str) -> tuple[list[str], list[tuple[int, ...]]]:
    line = text[text.index("func.func public @main") :].partition("\n")[0]
    _, _, results = line.partition("-> ")
    shapes = []
    for kind in re.findall(r"tensor<([^>]*)> \{", results):
        *sizes, _ = kind.split("x")
        shapes.append(tuple(int(size) for size in sizes))
    return [_ESCAPED.sub(_unescaped, name) for name in _NAME.findall(results)], shapes


def _unescaped(run: re.Match) -> str:
    """A backslash, or what MLIR writes as hexadecimal bytes: quotation marks, and all beyond ASCII, as UTF-8."""
    if run[0] == "\\\\":
        return "\\"
    return bytes.fromhex(run[0].replace("\\", "")).decode()


def _shardings(text: str, axes: dict[str, int], devices: list[jax.Device], count: int) -> list[Any]:
    if not axes:
        return [SingleDeviceSharding(devices[0])] * count
    mesh = Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
    found = _OUT.search(text)
    assert found is not None
    out = []
    for spec in _ONE.findall(found[1]):
        entries = [tuple(re.findall(r'"([^"]+)"', entry)) or None for entry in re.findall(r"\{([^}]*)\}", spec)]
        out.append(NamedSharding(mesh, PartitionSpec(*entries)))
    return out


def _execute(text: str, devices: list[jax.Device]) -> list[list[jax.Array]]:
    """For each output the parts of this process' devices."""
    from ...compat.jax_names import compiler, mlir, xla_client

    client = devices[0].client
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        backend=client,
    )
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        executable = compiler.backend_compile_and_load(
            client, module, xla_client.DeviceList(tuple(devices)), options, host_callbacks=[]
        )
    results = executable.execute_sharded([])
    return results.disassemble_into_single_device_arrays()
