"""What pyproject.toml cannot say: the readme of an index, and optional parts in C. Where these cannot be compiled, the
package goes without; with FIRSTLOSS_WITHOUT_C in the environment, they are left out, for a wheel of any platform.

Those of rng, lower and device are no Python modules, and the same file serves every Python: ctypes loads them. They are
extensions to setuptools, which so builds them in place for an editable install and puts them into wheels. To build them
in a source tree: python setup.py build_ext --inplace
"""

import os
import re

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FLAGS = [
    "-std=c11",
    "-O3",  # turns its loops into vectors, for which the next two are needed as well
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-wrapv",  # Python's own flags may ask for it, and then nothing here becomes vectors
    "-ffp-contract=off",  # its last bits depend on which operations are fused: those that it fuses itself
    "-fvisibility=hidden",
]
XLA = {
    "depends": [f"src/firstloss/lower/_{name}.h" for name in ("ffi", "norms", "pointwise", "processor")],
    "optional": True,
}

PARTS = [
    *(
        Extension(
            f"firstloss.rng.{name}",
            [f"src/firstloss/rng/{name}.c"],
            depends=[
                f"src/firstloss/rng/_{name}.h" for name in ("arithmetic", "avx512", "kernels", "erfinv", "erfinv_table")
            ],
            extra_compile_args=FLAGS,
            optional=True,
        )
        for name in ("_counter", "_fill", "_jump")
    ),
    Extension("firstloss.lower._aten", ["src/firstloss/lower/_aten.c"], extra_compile_args=FLAGS, **XLA),
    Extension("firstloss.lower._unwritten", ["src/firstloss/lower/_unwritten.c"], **XLA),
    Extension("firstloss.runtime.device._pages", ["src/firstloss/runtime/device/_pages.c"], optional=True),
    Extension(
        "firstloss.runtime.device._scratch_pool", ["src/firstloss/runtime/device/_scratch_pool.c"], optional=True
    ),
    Extension(
        "firstloss.runtime.guards._guards",
        ["src/firstloss/runtime/guards/_guards.c"],
        depends=["src/firstloss/runtime/guards/_recording.h"],
        optional=True,
    ),
]


class BuildParts(build_ext):
    """Leaves the version of Python out of the names of the parts that use none of its headers."""

    def get_ext_filename(self, fullname: str) -> str:
        name = super().get_ext_filename(fullname)
        return name if fullname.endswith("_guards") else name.partition(".")[0] + ".so"  # c_library.SUFFIX


def readme() -> str:
    """README.md. With FIRSTLOSS_URL, where the repository's files are (".../blob/main"), its links and pictures are
    absolute, as they have to be on an index."""
    with open("README.md", encoding="utf-8") as file:
        text = file.read()
    url = os.environ.get("FIRSTLOSS_URL", "").rstrip("/")
    if not url:
        return text
    text = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:)([^)]*)\)", rf"\g<1>{url}/\2?raw=true)", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?![a-z]+:|#)", rf"\g<1>{url}/", text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[] if os.environ.get("FIRSTLOSS_WITHOUT_C") else PARTS,
    cmdclass={"build_ext": BuildParts},
)
