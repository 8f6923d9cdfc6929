"""What pyproject.toml cannot say: an optional library in C. Where it cannot be compiled, the package goes without.

It is no Python module (ctypes loads it), but an extension to setuptools, which so builds it in place for an editable
install and puts it into wheels. To build it in a source tree: python setup.py build_ext --inplace
"""

from setuptools import Extension, setup

FLAGS = [
    "-std=c11",
    "-O3",  # turns its loops into vectors, for which the next two are needed as well
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # its last bits depend on which operations are fused: those that it fuses itself
    "-fvisibility=hidden",
]

setup(
    ext_modules=[
        Extension("firstloss.rng._fill", ["src/firstloss/rng/_fill.c"], extra_compile_args=FLAGS, optional=True)
    ]
)
