"""What `setup.py` passes to setuptools."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_PRINT = """
import json, setuptools
from distutils.core import run_setup
found = run_setup("setup.py", stop_after="init")
parts = [{"name": e.name, "sources": e.sources, "flags": e.extra_compile_args} for e in found.ext_modules]
print(json.dumps({"readme": found.metadata.long_description, "parts": parts}))
"""


def set_up() -> dict[str, Any]:
    """The readme of an index, and the parts in C: name, sources and flags of each. In a process of its own, since
    setuptools replaces modules of Python's."""
    done = subprocess.run([sys.executable, "-c", _PRINT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
