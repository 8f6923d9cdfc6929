"""`firstloss doctor`: what is installed and used, what is missing and what that costs; for bug reports."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import re
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from .. import processor
from ..c_library import GUARDS, SUFFIX
from ..dependencies import install
from ..errors import FirstlossError, MissingKernelsWarning
from ..interpreter import cores
from . import output

NAME = "doctor"
HELP = "print versions, the processor, which kernels are used, caches and patches, and what is missing"
EXAMPLE = "firstloss doctor --json > report.json   (to attach to a bug report)"

_ROOT = Path(__file__).parents[1]

PACKAGES = ("firstloss", "torch", "numpy", "jax", "jaxlib", "safetensors", "transformers")

# Environment variables that change what is used.
_VARIABLES = ("FIRSTLOSS_", "JAX_", "XLA_", "ATEN_", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "CUDA_VISIBLE_DEVICES")

# The parts written in C: what they do, and the module that loads them, with what says whether it could.
PARTS = {
    "rng/_fill": ("initialize weights", "firstloss.rng.native", "available"),
    "rng/_jump": ("begin in the middle of a random stream", "firstloss.rng.jump", "has_kernel"),
    "rng/_counter": ('initialize weights with rng="counter"', "firstloss.rng.counter", "has_kernels"),
    "runtime/device/_pages": ("move memory between PyTorch and JAX", "firstloss.runtime.device.pages", "ARE_AVAILABLE"),
    "runtime/device/_scratch_pool": (
        "keep the scratch memory of steps",
        "firstloss.runtime.device.scratch_pool",
        "IS_AVAILABLE",
    ),
    "runtime/guards/_guards": ("check guards", "firstloss.runtime.guards.native", "native"),
    "lower/_unwritten": (
        "allocate JAX arrays uninitialized",
        "firstloss.lower.unwritten",
        "registered_with_xla",
    ),
    "lower/_aten": ("call PyTorch's kernels in compiled steps", "firstloss.lower.aten", "registered_with_xla"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    report = examine()
    if args.json:
        output.print_json(report)
    else:
        _print(report)
    return 0


def examine() -> dict[str, Any]:
    """The report; `problems` are sentences, each with what to do."""
    import torch

    from ..compat import patches

    problems: list[str] = []
    packages = {name: _version(name) for name in PACKAGES}
    if packages["jax"] is None:
        problems.append(f"JAX is not installed, so no step can be compiled: {install('xla')}")
    parts = _parts(packages["jax"] is not None)
    missing = [name for name, state in parts.items() if state == "not built"]
    if missing:
        only_guards = all(name.endswith(GUARDS) for name in missing)
        slower = "steps up to 2 times" if only_guards else "initialization up to 6 times and steps up to 2 times"
        problems.append(
            f"parts in C were not built for this Python ({', '.join(missing)}), which makes {slower} as slow: install "
            "a C compiler, and Firstloss again, with pip's --no-binary firstloss."
        )
    return {
        "packages": packages,
        "supported": _supported(),
        "system": {"python": platform.python_version(), "platform": platform.platform(), "machine": platform.machine()},
        "processor": {
            "name": processor.name(),
            "cores": cores(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "memory": _memory(),
            "huge pages": _huge_pages(),
        },
        "devices": _devices(packages["jax"] is not None, problems),
        "parts in C": parts,
        "cache": _cache(problems),
        "environment": {name: text for name, text in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        "patches": {
            when: sorted(name for name, patch in patches.PATCHES.items() if patch.when == when)
            for when in dict.fromkeys(patch.when for patch in patches.PATCHES.values())
        },
        "problems": problems,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return importlib.import_module("firstloss").__version__ if name == "firstloss" else None


def _supported() -> dict[str, str]:
    """The versions that Firstloss works with, by package, if it is installed as one."""
    try:
        requirements = importlib.metadata.requires("firstloss") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"(torch|numpy|jax)(?:\[\w+\])?\s*([<>=!~][^;]*)", text) for text in requirements)
    return {match[1]: ",".join(sorted(match[2].strip().split(","), reverse=True)) for match in found if match}


def _parts(has_jax: bool) -> dict[str, str]:
    """Each part's state: "used", "not built", "not usable" on this machine or with these versions, or "not needed"
    without JAX."""
    states = {}
    for name, (_, module, attribute) in PARTS.items():
        if name.startswith("lower/") and not has_jax:
            states[name] = "not needed"
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MissingKernelsWarning)
            found = getattr(importlib.import_module(module), attribute)
            if found() if callable(found) else found:
                states[name] = "used"
            else:
                paths = (_ROOT / (name + suffix) for suffix in (SUFFIX, *EXTENSION_SUFFIXES))
                states[name] = "not usable" if any(path.exists() for path in paths) else "not built"
    return states


def _memory() -> int | None:
    """The machine's memory, in bytes."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _huge_pages() -> str:
    """The setting of transparent huge pages, and how fast the system hands out memory in them and in small ones."""
    from ..engine.huge_pages import first_touch_speeds

    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    chosen = re.search(r"\[(\w+)\]", text)
    small, huge = (f"{speed / 1e9:.1f} GB/s" for speed in first_touch_speeds())
    return f"{chosen[1] if chosen else 'unknown'}: {huge}, and {small} in small pages"


def _devices(has_jax: bool, problems: list[str]) -> dict[str, Any]:
    import torch

    devices: dict[str, Any] = {"torch": "cuda" if torch.cuda.is_available() else "cpu"}
    if not has_jax:
        return devices
    import jax

    from ..runtime.lazy_jax import unused_accelerator

    try:
        devices["jax"] = jax.default_backend()
        devices["jax devices"] = [str(device) for device in jax.devices()]
    except RuntimeError as error:  # a plug-in without its device
        devices["jax"] = f"{error}".splitlines()[0]
        problems.append(f"JAX finds no device: {devices['jax']}")
    if unused := unused_accelerator():
        problems.append(unused)
    return devices


def _cache(problems: list[str]) -> dict[str, Any]:
    """The folder of compiled steps; it is not created."""
    from .. import cache_folder

    folder = cache_folder.default()
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    usable = os.access(nearest, os.W_OK)
    if not usable:
        problems.append(f"compiled steps are not cached: {nearest} cannot be written. Set FIRSTLOSS_CACHE.")
    return {"folder": str(folder), "files": len(files), "bytes": sum(files), "limit": cache_folder.LIMIT}


def _print(report: dict[str, Any]) -> None:
    try:
        console = output.console()
    except ModuleNotFoundError as error:
        raise FirstlossError(f"{error.name} is not installed: {install('cli')}. Or add --json.") from error
    from rich.table import Table

    supported = report["supported"]
    cache, processor, devices = report["cache"], report["processor"], report["devices"]
    sections: dict[str, dict[str, str]] = {
        "packages": {
            name: (version or "not installed") + (f"   (works with {supported[name]})" if name in supported else "")
            for name, version in report["packages"].items()
        },
        "system": report["system"],
        "processor": {
            name: output.size(value) if name == "memory" and value else str(value) for name, value in processor.items()
        },
        "devices": {name: found if isinstance(found, str) else ", ".join(found) for name, found in devices.items()},
        "parts in C": {name: f"{state}: {PARTS[name][0]}" for name, state in report["parts in C"].items()},
        "cache": {
            "folder": cache["folder"],
            "size": f"{output.size(cache['bytes'])} in {cache['files']:,} files, at most {output.size(cache['limit'])}",
        },
        "environment": report["environment"],
        "patches": {when: f"{len(names)} functions (--json lists them)" for when, names in report["patches"].items()},
    }
    for title, rows in sections.items():
        if not rows:
            continue
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
        for name, text in rows.items():
            table.add_row(f"  {name}", text)
        console.print(table)
    for problem in report["problems"]:
        console.print(f"problem: {problem}", soft_wrap=True, markup=False)
    if not report["problems"]:
        console.print("No problems found.")
