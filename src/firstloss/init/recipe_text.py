"""A recipe in words: "normal(0, 0.02)", "zeros", "copy of uniform(-0.1, 0.1), then times 2"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat.torch_names import schema_of
from ..program.graph import Node, Ref, Value

_MAX_STEPS = 6  # of a longer recipe only the last operations are shown
_OMITTED = {"alias", "detach", "contiguous", "lift_fresh"}


def in_words(ref: Ref) -> str:
    """A description of the recipe of `ref`."""
    steps = _steps(ref.value, _MAX_STEPS)
    whole = ref.whole or ref.covers
    return ", then ".join(steps) + ("" if whole else " (a view of it)")


def _steps(value: Value, limit: int) -> list[str]:
    steps: list[str] = []
    while True:
        if value.known:
            steps.append("constant")
            break
        node = value.node
        if node is None or _name(node) in ("empty", "empty_strided"):
            steps.append("left unwritten")
            break
        if len(steps) == limit:
            steps.append("...")
            break
        name = _name(node)
        if name not in _OMITTED:
            steps.append(_step(node, limit - len(steps)))
        source = _continues(node, value)
        if source is None:
            break
        value = source
    if len(steps) > 1 and steps[-1] == "left unwritten":
        steps.pop()
    return steps[::-1]


def _continues(node: Node, value: Value) -> Value | None:
    """The Value that the operation modifies, if any."""
    if node.overwrites:
        return None
    for written, out in zip(node.writes, node.outputs, strict=False):
        if out is value:
            return written.value
    refs = list(node.refs())
    return refs[0].value if len(refs) >= 1 and _name(node) not in ("copy",) else None


def _step(node: Node, limit: int) -> str:
    name, partly = _name(node), node.writes and not node.overwrites and not node.writes[0].covers
    describe = _WORDS.get(name)
    if name == "copy":
        other = next((a for a in node.args[1:] if type(a) is Ref), None)
        source = ", then ".join(_steps(other.value, limit - 1)) if other and limit > 1 else "..."
        text = f"copy of ({source})" if "," in source else f"copy of {source}"
    elif describe is not None:
        text = describe(_arguments(node))
    else:
        numbers = [_number(a) for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
        text = name + (f"({', '.join(numbers)})" if numbers else "")
    return text + (" in part" if partly else "")


def _name(node: Node) -> str:
    return schema_of(node.op).name.split("::")[1].rstrip("_")


def _arguments(node: Node) -> dict[str, Any]:
    """The node's arguments by name, including defaults."""
    out = {spec.name: spec.default_value for spec in schema_of(node.op).arguments if spec.has_default_value()}
    out.update(
        {spec.name: arg for spec, arg in zip(schema_of(node.op).arguments, node.args, strict=False)}, **node.kwargs
    )
    return out


def _number(number: Any) -> str:
    if type(number) is Ref:
        return "a tensor"
    return f"{number:g}" if isinstance(number, (int, float)) else str(number)


_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "normal": lambda a: f"normal({_number(a.get('mean', 0))}, {_number(a.get('std', 1))})",
    "uniform": lambda a: f"uniform({_number(a.get('from', 0))}, {_number(a.get('to', 1))})",
    "trunc_normal": lambda a: (
        f"trunc_normal({_number(a['mean'])}, {_number(a['std'])}, {_number(a['a'])}, {_number(a['b'])})"
    ),
    "rand": lambda a: "uniform(0, 1)",
    "randn": lambda a: "normal(0, 1)",
    "zero": lambda a: "zeros",
    "zeros": lambda a: "zeros",
    "ones": lambda a: "ones",
    "fill": lambda a: {"0": "zeros", "1": "ones"}.get(number := _number(a.get("value")), f"full({number})"),
    "full": lambda a: f"full({_number(a.get('fill_value'))})",
    "mul": lambda a: f"times {_number(a['other'])}" if isinstance(a["other"], (int, float)) else "times a tensor",
    "add": lambda a: f"plus {_number(a['other'])}" if isinstance(a["other"], (int, float)) else "plus a tensor",
    "div": lambda a: f"over {_number(a['other'])}" if isinstance(a["other"], (int, float)) else "over a tensor",
    "_to_copy": lambda a: f"as {str(a.get('dtype')).removeprefix('torch.')}",
    "clone": lambda a: "cloned",
    "arange": lambda a: "arange",
    "linspace": lambda a: "linspace",
}
