"""Our declarations of XLA's C interface for handlers, against the header that JAX ships."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax


def assert_declared(
    source: Path, fields: Iterable[tuple[str, str, str, str]], numbers: Mapping[str, str], folder: Path
) -> None:
    """Assert that the structures declared in a C source have XLA's layout.

    Args:
        source: the C source.
        fields: (our structure, its field, the header's structure, its field).
        numbers: our constants, and the header's.
        folder: for the program that the compiler checks.
    """
    checks = [
        f"offsetof({actual}, {field}) == offsetof({expected}, {name})" for actual, field, expected, name in fields
    ]
    checks += [f"(int){actual} == (int){expected}" for actual, expected in numbers.items()]
    lines = [f'_Static_assert({check}, "{i}");' for i, check in enumerate(checks)]
    program = folder / "check.c"
    program.write_text("\n".join(['#include "xla/ffi/api/c_api.h"', f'#include "{source}"', *lines, ""]))
    command = ["cc", "-std=c11", "-fsyntax-only", f"-I{jax.ffi.include_dir()}", str(program)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
