"""Meshes, in processes that have eight devices: the cases are in mesh_cases.py."""

import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
def test_eight_devices_in_one_process():
    cases = os.path.join(os.path.dirname(__file__), "mesh_cases.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", cases],
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(cases))),
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
