"""A Program as executable Python, which `print(program)` prints.

    exec(str(program), scope := program.scope())
    outputs = scope["program"](*inputs)

Each storage is one tensor, views are views of it, and in-place operations are in place, as in eager PyTorch. Comments
give the user's line of each operation, and the shape and dtype of its result.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..compat.torch_names import OpOverload, schema_of
from .graph import is_number_type
from .source import Source

if TYPE_CHECKING:
    from ..rng.stream import Stream
    from .graph import Node, Ref, Value

_HEAD = "import torch\nfrom firstloss.engine.text_runtime import draw, made, view\n\naten = torch.ops.aten\n\n\n"
_LITERALS = (type(None), bool, int, str, torch.dtype, torch.layout, torch.memory_format)


class _Program(Protocol):
    @property
    def inputs(self) -> dict[str, Value]: ...

    @property
    def outputs(self) -> dict[str, Ref]: ...

    @property
    def nodes(self) -> list[Node]: ...

    @property
    def notes(self) -> Mapping[str, str]: ...


class PythonText:
    """The text of one Program, and the names of its free variables.

    Attributes:
        constants: known Values.
        streams: the random streams that it draws from.
        objects: other arguments that cannot be written as text.
    """

    def __init__(self, program: _Program) -> None:
        self.constants: dict[Value, str] = {}
        self.streams: dict[Stream, str] = {}
        self.objects: dict[int, tuple[str, Any]] = {}
        self._names: dict[Value, str] = {}
        self._count = 0
        self._written = {ref.value for node in program.nodes for ref in node.writes}
        self._inputs = set(program.inputs.values())
        self._lines: list[str] = []
        self._source: Source | None = None
        self.parameters: list[str] = self._take_inputs(program)
        for node in program.nodes:
            self._add_node(node)
        results = [f"{name!r}: {self._show(ref)}" for name, ref in program.outputs.items()]
        self._lines += [f"# {name}: {note}" for name, note in program.notes.items()]
        self._lines.append(f"return {{{', '.join(results)}}}")

    def __str__(self) -> str:
        body = "".join(f"    {line}\n" for line in self._lines)
        return f"{_HEAD}@torch.no_grad()\ndef program({', '.join(self.parameters)}):\n{body}"

    # -- names --

    def _take_inputs(self, program: _Program) -> list[str]:
        views = {ref.value for node in program.nodes for ref in (*node.refs(), *node.writes) if not ref.whole}
        views |= {ref.value for ref in program.outputs.values() if not ref.whole}
        taken: set[str] = set()
        for label, value in program.inputs.items():
            plain = re.sub(r"\W", "_", label)
            plain = f"input_{plain}" if not plain.isidentifier() or keyword.iskeyword(plain) else plain
            name, number = plain, 1
            while name in taken:
                number += 1
                name = f"{plain}_{number}"
            taken.add(name)
            self._names[value] = name
            copied = f".copy_({name})" if value in self._written | views else None
            self._lines.append(
                f"# {name}: {_kind(value)}" if copied is None else f"{name} = {_empty(value)}{copied}  # {_kind(value)}"
            )
        return list(self._names.values())

    def _new_name(self, value: Value) -> str:
        name = self._names[value] = f"v{self._count}"
        self._count += 1
        return name

    def _name(self, value: Value) -> str:
        """The name of the tensor that holds a Value; defines it if no operation does."""
        if value in self._names:
            return self._names[value]
        if not value.known:
            name = self._new_name(value)
            self._lines.append(f"{name} = {_empty(value)}  # {_kind(value)}, not written")
            return name
        constant = self.constants.setdefault(value, f"constant{len(self.constants)}")
        if value not in self._written:
            self._names[value] = constant
            return constant
        name = self._new_name(value)
        self._lines.append(f"{name} = {constant}.clone()  # {_kind(value)}")
        return name

    # -- operations --

    def _add_node(self, node: Node) -> None:
        if node.source != self._source:
            self._source = node.source
            self._lines.append(f"# {node.source}")
        numbers = {argument.name for argument in schema_of(node.op).arguments if is_number_type(argument.type)}
        names = [argument.name for argument in schema_of(node.op).arguments]
        names += [""] * (len(node.args) - len(names))
        texts = [self._show(arg, name in numbers) for arg, name in zip(node.args, names, strict=False)]
        named = {key: self._show(value, key in numbers) for key, value in node.kwargs.items()}
        texts += [f"{key}={text}" for key, text in named.items() if not keyword.iskeyword(key)]
        texts += [f"**{{{key!r}: {text}}}" for key, text in named.items() if keyword.iskeyword(key)]
        self._lines.append(self._assigned(node, self._call(node, texts)))

    def _call(self, node: Node, texts: list[str]) -> str:
        op = self._op(node.op)
        if node.draw is None:
            return f"{op}({', '.join(texts)})"
        stream = self.streams.setdefault(node.draw.stream, f"stream{len(self.streams)}")
        words, spare = node.draw.position
        return f"draw({', '.join([stream, repr(words if spare is None else (words, spare)), op, *texts])})"

    def _assigned(self, node: Node, call: str) -> str:
        returns = [str(result.type) for result in schema_of(node.op).returns]
        new_outputs = node.outputs[len(node.writes) :]
        if not new_outputs and len(node.writes) == 1 and node.writes[0].whole and returns == ["Tensor"]:
            return f"{self._new_name(node.outputs[0])} = {call}  # {_kind(node.outputs[0])}"
        storages = [self._name(ref.value) for ref in node.writes]
        targets = [self._new_name(value) for value in new_outputs]
        if targets:
            if returns == ["List[Tensor]"] or returns == ["Tensor"] * len(targets):
                comma = "," if returns != ["Tensor"] and len(targets) == 1 else ""
            else:
                comma, call = "," if len(targets) == 1 else "", f"made({call}, {len(targets)})"
            call = f"{', '.join(targets)}{comma} = {call}"
        for storage, value in zip(storages, node.outputs, strict=False):  # written in place
            self._names[value] = storage
        return f"{call}  # {', '.join(map(_kind, new_outputs))}" if new_outputs else call

    def _op(self, op: Any) -> str:
        if not isinstance(op, OpOverload):
            return self._object(op)
        namespace, *parts = str(op).split(".")
        text = "aten" if namespace == "aten" else f"torch.ops.{namespace}"
        for part in parts:
            text = f"getattr({text}, {part!r})" if keyword.iskeyword(part) else f"{text}.{part}"
        return text

    # -- arguments --

    def _show(self, arg: Any, number: bool = False) -> str:
        if hasattr(arg, "as_python"):  # a Ref
            text = self._view(arg)
            return f"{text}.item()" if number else text
        if type(arg) in (list, tuple):
            return "[" + ", ".join(self._show(a, number) for a in arg) + "]"
        if type(arg) is float:
            return repr(arg) if arg - arg == 0 else f"float({str(arg)!r})"
        if isinstance(arg, torch.device):
            return f"torch.device({str(arg)!r})"
        return repr(arg) if isinstance(arg, _LITERALS) else self._object(arg)

    def _view(self, ref: Ref) -> str:
        return ref.as_python(self._name(ref.value))

    def _object(self, obj: Any) -> str:
        return self.objects.setdefault(id(obj), (f"object{len(self.objects)}", obj))[0]


def _kind(value: Value) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _empty(value: Value) -> str:
    device = "" if value.device.type == "cpu" else f", device={str(value.device)!r}"
    return f"torch.empty_strided({tuple(value.shape)}, {tuple(value.stride)}, dtype={value.dtype}{device})"


def scope_of(program: _Program) -> dict[str, Any]:
    """The values of the free names in a Program's text."""
    text = PythonText(program)
    scope: dict[str, Any] = {name: value.empty().copy_(value.content()) for value, name in text.constants.items()}
    scope.update({name: stream for stream, name in text.streams.items()})
    scope.update(dict(text.objects.values()))
    return scope
