"""The files that `make dist` leaves in dist/, each installed into an empty environment without a compiler."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import firstloss as fl

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"

pytestmark = pytest.mark.skipif(not DIST.is_dir(), reason="there is no dist/: make dist creates it, and runs these")

# The first use of the package, compared with eager PyTorch: what it prints is "same", after its warnings.
USE = """
import sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import firstloss as fl
    torch.manual_seed(0)
    model = fl.materialize_module(fl.deferred_init(torch.nn.Linear, 300, 200))
    torch.manual_seed(0)
    same = torch.equal(model.weight, torch.nn.Linear(300, 200).weight)
print([type(w.message).__name__ for w in caught if "firstloss" in type(w.message).__module__])
print(fl.__file__)
print("same" if same else "other bits")
"""


def only(pattern):
    found = sorted(DIST.glob(pattern))
    assert len(found) == 1, f"{pattern}: {[path.name for path in found]}"
    return found[0]


class Environment:
    """An environment without pip and without compilers, to which PyTorch, NumPy and JAX are lent."""

    def __init__(self, folder):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = folder / "bin" / "python"
        packages = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        lent = Path(os.path.dirname(os.path.dirname(sys.modules["torch"].__file__)))
        (packages / "lent.pth").write_text(f"{lent}\n")  # without the .pth files there, one of which is this checkout's
        self.variables = {"PATH": str(folder / "bin"), "CC": "/nowhere/cc", "HOME": str(folder)}

    def run(self, *arguments):
        variables = getattr(self, "variables", {})
        done = subprocess.run(
            [str(self.python), *arguments], capture_output=True, text=True, cwd=self.python.parent, env=variables
        )
        assert done.returncode == 0, done.stderr
        return done

    def install(self, path):
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index"]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(self.python), "install", *options, str(path)],
            capture_output=True,
            text=True,
            env={**os.environ, **self.variables, "PATH": str(self.python.parent)},
        )
        assert done.returncode == 0, done.stderr

    def use(self):
        """The names of Firstloss's warnings, and the report of `firstloss doctor`."""
        warned, file, result = self.run("-c", USE).stdout.splitlines()[-3:]
        assert result == "same" and Path(file).is_relative_to(self.python.parents[1])
        return warned, json.loads(self.run(str(self.python.with_name("firstloss")), "doctor", "--json").stdout)


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "environment")


def test_the_wheel_of_any_platform_runs_without_the_parts_in_c_and_says_so(environment):
    environment.install(only(f"firstloss-{fl.__version__}-py3-none-any.whl"))
    warned, report = environment.use()
    assert warned == "['MissingKernelsWarning']"
    assert "used" not in report["parts in C"].values() and any("C compiler" in text for text in report["problems"])


@pytest.mark.skipif(sys.platform != "linux", reason="auditwheel repairs wheels for Linux")
def test_the_wheel_of_this_platform_has_all_parts_in_c(environment):
    path = only(f"firstloss-{fl.__version__}-py3-none-*manylinux*.whl")
    environment.install(path)
    warned, report = environment.use()
    assert warned == "[]" and set(report["parts in C"].values()) == {"used"}, report["parts in C"]
    assert not any("compiler" in text for text in report["problems"])
    assert int(re.search(r"manylinux_2_(\d+)_", path.name)[1]) <= 28  # the glibc that PyTorch's wheels need
    parts = [name for name in zipfile.ZipFile(path).namelist() if name.endswith(".so")]
    assert {name.count(".") for name in parts if "_guards" not in name} == {1}, parts  # one for all Pythons


def test_the_source_installs_where_nothing_compiles(environment):
    environment.install(only(f"firstloss-{fl.__version__}.tar.gz"))
    warned, report = environment.use()
    assert warned == "['MissingKernelsWarning']" and "not built" in report["parts in C"].values()


def test_nothing_is_missing_and_nothing_else_is_packed():
    tracked = subprocess.run(["git", "ls-files", "src"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    source = {Path(line).relative_to("src").as_posix() for line in tracked.splitlines()}
    with tarfile.open(only(f"firstloss-{fl.__version__}.tar.gz")) as archive:
        packed = {name.split("/", 2)[2] for name in archive.getnames() if name.count("/src/firstloss/")}
        packed = {name for name in packed if Path(name).suffix}
    assert packed == source
    needed = {name for name in source if Path(name).suffix not in (".c", ".h")} | {
        name for name in source if name.startswith("firstloss/gpu/") and name.endswith(".h")
    }
    for path in DIST.glob("*.whl"):
        names = set(zipfile.ZipFile(path).namelist())
        assert needed <= names, sorted(needed - names)
        assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
        assert path.name.endswith("none-any.whl") != any(name.endswith(".so") for name in names)
