"""Which files belong to installed packages."""

import os
import subprocess
import sys

import numpy as np

from firstloss.compat.installed import is_installed_file

SCRIPT = """
import sys
import library, mine.code
from firstloss.compat.installed import is_installed_file
print([is_installed_file(file) for file in (library.__file__, mine.code.__file__, __file__)])
"""


def test_packages_are_found_in_every_folder_that_they_are_installed_into(tmp_path):
    """As by `pip install --target`, and for a script beside packages that were installed into its own folder."""
    packages, script = tmp_path / "packages", tmp_path / "script"
    for folder in (packages, script):
        (folder / "library-1.0.dist-info").mkdir(parents=True)
    (packages / "library.py").touch()
    (script / "mine").mkdir()
    (script / "mine" / "code.py").touch()
    (script / "run.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script / "run.py"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(packages)},
    )
    assert done.stdout.strip() == "[True, False, False]"


def test_an_environments_packages_are_installed():
    assert is_installed_file(np.__file__)
    assert not is_installed_file(__file__)
