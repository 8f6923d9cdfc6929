"""This machine's processor, as its operating system describes it."""

from __future__ import annotations

import functools
import platform
from pathlib import Path


@functools.cache
def fields() -> dict[str, str]:
    """The description of the first core: "model name", "flags" and more; empty where there is none (not on Linux)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def name() -> str:
    """The processor's name; "unknown" if there is none."""
    return fields().get("model name") or fields().get("CPU part") or platform.processor() or "unknown"


def instructions() -> str:
    """The instruction sets that it has, on which generated code depends."""
    return fields().get("flags") or fields().get("Features") or platform.processor()
