"""The types of all public names are known to an editor, as pyright reports them for an installed package."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import firstloss

# The rest are mostly arrays in lowering rules, whose arguments have no annotations.
LEAST = 0.95


def test_types_are_complete(tmp_path):
    """Read from a virtual environment of its own, since pyright does not find packages that are installed editable."""
    venv.create(tmp_path, with_pip=False)
    site = tmp_path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    shutil.copytree(Path(firstloss.__file__).parent, site / "firstloss")
    environment = {**os.environ, "VIRTUAL_ENV": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "basedpyright", "--verifytypes", "firstloss", "--ignoreexternal", "--outputjson"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    report = json.loads(result.stdout)["typeCompleteness"]
    assert report["exportedSymbolCounts"]["withKnownType"] > 5000, result.stdout[:2000]
    unknown = [s["name"] for s in report["symbols"] if s["isExported"] and not s["isTypeKnown"]]
    assert report["completenessScore"] >= LEAST, unknown
