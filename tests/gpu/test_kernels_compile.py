"""The kernels compile, if there is a CUDA compiler (no GPU is needed), with explicit rounding."""

import re

import pytest

from firstloss.errors import BackendError
from firstloss.gpu import kernels, nvrtc

from . import toolkit

UNITS = {"mt19937": nvrtc.UNFUSED, "philox": nvrtc.AS_PYTORCH}
KERNELS = {"mt19937": ("fill", "jump_windows"), "philox": ("philox_fill",)}
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
needs_nvrtc = pytest.mark.skipif(
    not toolkit.has_nvrtc(), reason="there is no NVRTC: this PyTorch is not built for CUDA"
)
needs_nvcc = pytest.mark.skipif(toolkit.nvcc() is None, reason="there is no nvcc on this machine")
COMPILERS = [
    pytest.param(nvrtc.compile, marks=needs_nvrtc, id="NVRTC"),
    pytest.param(lambda *given, **how: toolkit.compile(*given, **how).code, marks=needs_nvcc, id="nvcc"),
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("part", UNITS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_kernels_compile(compiler, part, architecture):
    cubin = compiler(kernels.source(part), part, architecture, UNITS[part])
    assert cubin[:4] == b"\x7fELF"
    for name in KERNELS[part]:
        assert name.encode() in cubin


@needs_nvcc
@pytest.mark.parametrize("part, registers", [("mt19937", 64), ("philox", 64)])
def test_kernels_do_not_spill_registers(part, registers):
    """Four blocks of 256 threads fit on a multiprocessor, and no register is spilled."""
    compiled = toolkit.compile(kernels.source(part), part, "sm_90", UNITS[part]).kernels
    assert compiled.keys() == set(KERNELS[part])
    for name, (used, spilled, shared) in compiled.items():
        assert used <= registers and spilled == 0 and shared <= 48 << 10, (name, used, spilled, shared)


def ptx_of(part):
    """The PTX code from whichever compiler is installed."""
    arguments = kernels.source(part), part, "sm_90", UNITS[part]
    code = nvrtc.compile(*arguments, ptx=True) if toolkit.has_nvrtc() else toolkit.compile(*arguments, ptx=True).code
    return code.decode()


needs_either = pytest.mark.skipif(
    not toolkit.has_nvrtc() and toolkit.nvcc() is None, reason="there is neither NVRTC nor nvcc on this machine"
)


@needs_either
def test_arithmetic_for_the_cpus_bits_is_not_fused():
    """PTX operations with an explicit rounding mode are never fused; those without one may be."""
    text = ptx_of("mt19937")
    body = text[text.index(".entry fill") :]
    operations = re.findall(r"\b(?:mul|add|sub|fma|sqrt|div)\.(?:[a-z.]*)f(?:32|64)\b", body)
    assert operations and all(".rn." in operation for operation in operations), set(operations)
    assert not re.search(r"\.(approx|ftz)\b", body)
    # Only the explicit fused operations: for a normal 8 + 2 + 1 in the logarithm, 3 + 3 + 3 for an angle, 2 at the end.
    assert len(re.findall(r"\bfma\.rn\.f32\b", body)) == 8 + 3 + 3 + 3 + 3 + 2 + 1
    assert len(re.findall(r"\bfma\.rn\.f64\b", body)) == 1


@needs_either
@pytest.mark.parametrize("part", UNITS)
def test_elements_are_counted_in_64_bits(part):
    """Elements are stored at addresses computed from a 64-bit index: with a 32-bit one, a tensor of more than 2^31
    elements would be written at wrong addresses."""
    text = ptx_of(part)
    body = text[text.index(f".entry {KERNELS[part][0]}") :]
    body = body[: body.index(".entry", 10)] if body.count(".entry") > 1 else body
    stores = re.findall(r"\bst\.(?:global\.)?(?:u16|b16|f32|b32|u32|f64|b64)\s+\[(%rd\d+)", body)
    assert stores
    for address in set(stores):
        instructions = [
            line for line in body.splitlines() if re.search(rf"\b(?:add|mad|shl)\.\S+\s+{address}\b,", line)
        ]
        assert instructions and all(re.search(r"\.[sub]64", line) for line in instructions), (address, instructions)
        indices = set(re.findall(r"%rd\d+", " ".join(instructions))) - {address}
        for index in indices:
            scaled = [line for line in body.splitlines() if re.search(rf"\S+\s+{index}\b,", line)]
            assert not any(re.search(r"\bcvt\.[su]64\.[su]32|\bmul\.wide", line) for line in scaled), scaled


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_compile_error_has_the_compilers_log(compiler):
    with pytest.raises((BackendError, AssertionError), match=r"undefined_name"):
        compiler("__global__ void f() { undefined_name(); }", "f", "sm_90")
