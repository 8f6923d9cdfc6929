"""The kernels compile for GPUs, which needs none, where there is a compiler. What they round is written out."""

import re

import pytest

from firstloss.errors import BackendError
from firstloss.gpu import kernels, nvrtc


def has_compiler():
    try:
        nvrtc.library()
    except BackendError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no NVRTC here: this PyTorch is not built for CUDA")
UNITS = {"mt19937": nvrtc.UNFUSED, "philox": nvrtc.AS_PYTORCH}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("part", UNITS)
def test_they_compile(part, architecture):
    cubin = nvrtc.compile(kernels.source(part), part, architecture, UNITS[part])
    assert cubin[:4] == b"\x7fELF"
    for name in {"mt19937": (b"fill", b"spread"), "philox": (b"philox_fill",)}[part]:
        assert name in cubin


def test_nothing_of_the_cpus_bits_may_be_fused():
    """In PTX an operation that says how it rounds is never fused with another; one that does not may be."""
    text = nvrtc.compile(kernels.source("mt19937"), "mt19937", "sm_90", nvrtc.UNFUSED, ptx=True).decode()
    body = text[text.index(".entry fill") :]
    found = re.findall(r"\b(?:mul|add|sub|fma|sqrt|div)\.(?:[a-z.]*)f(?:32|64)\b", body)
    assert found and all(".rn." in operation for operation in found), set(found)
    assert not re.search(r"\.(approx|ftz)\b", body)
    # As many fused ones as are written: of a normal 8 + 2 + 1 in the logarithm, 3 + 3 + 3 of an angle, 2 at the end.
    assert len(re.findall(r"\bfma\.rn\.f32\b", body)) == 8 + 3 + 3 + 3 + 3 + 2 + 1
    assert len(re.findall(r"\bfma\.rn\.f64\b", body)) == 1


def test_an_error_has_the_compilers_log():
    with pytest.raises(BackendError, match=r"undefined_name"):
        nvrtc.compile("__global__ void f() { undefined_name(); }", "f", "sm_90")
