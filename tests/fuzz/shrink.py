"""Shrink a failing program: remove statements as long as it fails in the same way."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable, Iterator

_PARSING = threading.Lock()  # Python 3.11 counts the depth of syntax trees across threads, and raises errors


def shrink(source: str, fails: Callable[[str], bool], most: int = 400) -> str:
    """The smallest program found by removing statements of `source`.

    Args:
        fails: whether a program fails in the way that is looked for.
        most: how many programs to try at most.
    """
    tried: set[str] = {source}
    left = [most]

    def holds(candidate: str) -> bool:
        if candidate in tried or left[0] <= 0:
            return False
        tried.add(candidate)
        left[0] -= 1
        return fails(candidate)

    before = ""
    while before != source and left[0] > 0:
        before = source
        for attempt in (_with_fewer_steps, _without_blocks, _without_statements, _unwrapped):
            i = 0
            while left[0] > 0:
                with _PARSING:
                    candidates = list(attempt(source))
                if i >= len(candidates):
                    break
                if holds(candidates[i]):
                    source = candidates[i]  # the next candidate is now approximately the i-th
                else:
                    i += 1
    return source


def _with_fewer_steps(source: str) -> Iterator[str]:
    loop = re.search(r"for i in range\((\d+)\)", source)
    for count in range(1, int(loop[1]) if loop else 0):
        yield source.replace(loop[0], f"for i in range({count})")


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements, outermost first."""
    todo = [tree]
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            continue  # how the program is run
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield body
        todo.extend(ast.iter_child_nodes(node))


def _span(statement: ast.stmt) -> tuple[int, int]:
    decorators = [d.lineno for d in getattr(statement, "decorator_list", [])]
    return min([statement.lineno, *decorators]), statement.end_lineno or statement.lineno


def _cut(source: str, body: list[ast.stmt], first: int, count: int) -> str | None:
    """`source` without the lines of `count` statements of `body`, starting at the `first`-th."""
    start, end = _span(body[first])[0], _span(body[first + count - 1])[1]
    lines = source.splitlines()
    indent = " " * body[first].col_offset
    whole = count == len(body)
    text = "\n".join([*lines[: start - 1], *([indent + "pass"] if whole else []), *lines[end:]]) + "\n"
    try:
        ast.parse(text)
    except SyntaxError:
        return None
    return text if "__name__" in text or "__name__" not in source else None


def _without_blocks(source: str) -> Iterator[str]:
    for body in _bodies(ast.parse(source)):
        size = len(body) // 2
        while size > 1:
            for first in range(len(body) - size, -1, -size):
                if (text := _cut(source, body, first, size)) is not None:
                    yield text
            size //= 2


def _without_statements(source: str) -> Iterator[str]:
    for body in _bodies(ast.parse(source)):
        for first in range(len(body) - 1, -1, -1):
            if isinstance(body[first], (ast.Pass, ast.Return)) or "__name__" in ast.unparse(body[first])[:20]:
                continue
            if (text := _cut(source, body, first, 1)) is not None:
                yield text


def _unwrapped(source: str) -> Iterator[str]:
    """The body of `with ...:`, `if ...:` or `try:` in place of the block."""
    lines = source.splitlines()
    for body in _bodies(ast.parse(source)):
        for statement in body:
            if not isinstance(statement, (ast.With, ast.If, ast.Try)):
                continue
            start, end = _span(statement)
            inner = statement.body
            first, last = _span(inner[0])[0], _span(inner[-1])[1]
            less = inner[0].col_offset - statement.col_offset
            if first == start or less <= 0:
                continue
            text = "\n".join([*lines[: start - 1], *(line[less:] for line in lines[first - 1 : last]), *lines[end:]])
            try:
                ast.parse(text)
            except SyntaxError:
                continue
            yield text + "\n"
