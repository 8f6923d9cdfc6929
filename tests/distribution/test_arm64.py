"""The parts in C for ARM's processors: each compiles, and what is not for x86 alone has the same bits in an emulator.

Run by `make dist`, which installs the compiler (zig) and the emulator (Unicorn).
"""

import struct
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

from firstloss.rng import counter, jump
from tests.distribution.set_up import ROOT, set_up

pytest.importorskip("ziglang", reason="make dist installs it")
pytest.importorskip("unicorn", reason="make dist installs it")

import unicorn
from elftools.elf.elffile import ELFFile
from unicorn import arm64_const as arm64

PAGE = 1 << 16
RETURN, STACK, ARRAYS = 0x10_0000_0000, 0x20_0000_0000, 0x30_0000_0000  # where these are in the emulator's memory
FUNCTIONS = ("firstloss_generate", "firstloss_jump", "firstloss_counter_normal", "firstloss_counter_uniform")


PARTS = {part["name"]: part for part in set_up()["parts"]}


def compile_for(target, *arguments):
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-Wall", "-Werror", *arguments]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TARGETS = [
    (name, target)
    for name in PARTS
    for target in ("aarch64-linux-gnu", "aarch64-macos")
    if not (name.endswith(("_pages", "_scratch_pool")) and "linux" not in target)  # these use calls of Linux's
]


@pytest.mark.parametrize("name, target", TARGETS)
def test_each_part_compiles(name, target, tmp_path):
    import jax

    includes = [f"-I{sysconfig.get_paths()['include']}", f"-I{jax.ffi.include_dir()}"]
    flags = [*PARTS[name]["flags"], "-Wno-unused-function", "-Wno-unknown-pragmas", *includes]
    compile_for(target, *flags, "-c", *PARTS[name]["sources"], "-o", tmp_path / "part.o")


class Emulator:
    """A program for ARM, whose functions are called one at a time."""

    def __init__(self, program):
        self._cpu = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._cpu.reg_write(arm64.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # floating-point registers may be used
        with open(program, "rb") as file:
            elf = ELFFile(file)
            self._functions = {s.name: s["st_value"] for s in elf.get_section_by_name(".symtab").iter_symbols()}
            mapped = set()
            for segment in elf.iter_segments("PT_LOAD"):
                begin, size = segment["p_vaddr"], segment["p_memsz"]
                for page in range(begin // PAGE, (begin + size - 1) // PAGE + 1):
                    if page not in mapped:
                        self._cpu.mem_map(page * PAGE, PAGE)
                        mapped.add(page)
                self._cpu.mem_write(begin, segment.data())
        for begin in (RETURN, STACK):
            self._cpu.mem_map(begin, 16 * PAGE)
        self._cpu.mem_map(ARRAYS, 1 << 26)

    def call(self, name, *arguments):
        """Call a function; what it has written to arrays is copied back to them."""
        integers, doubles, arrays, free = iter(range(8)), iter(range(8)), [], ARRAYS
        for argument in arguments:
            if isinstance(argument, float):
                (bits,) = struct.unpack("<Q", struct.pack("<d", argument))
                self._cpu.reg_write(arm64.UC_ARM64_REG_D0 + next(doubles), bits)
                continue
            if isinstance(argument, np.ndarray):
                self._cpu.mem_write(free, argument.tobytes())
                arrays.append((argument, free))
                argument, free = free, free + -(-argument.nbytes // 64) * 64
            self._cpu.reg_write(arm64.UC_ARM64_REG_X0 + next(integers), argument)
        self._cpu.reg_write(arm64.UC_ARM64_REG_SP, STACK + 15 * PAGE)
        self._cpu.reg_write(arm64.UC_ARM64_REG_LR, RETURN)
        self._cpu.emu_start(self._functions[name], RETURN)
        for array, begin in arrays:
            array.flat[:] = np.frombuffer(self._cpu.mem_read(begin, array.nbytes), array.dtype)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arm64")
    flags = PARTS["firstloss.rng._jump"]["flags"]
    main = folder / "main.c"
    main.write_text(
        "".join(f"void {name}(void);\n" for name in FUNCTIONS)
        + f"int main(int n, char **names) {{ void (*const all[])(void) = {{{', '.join(FUNCTIONS)}}}; "
        "all[n & 3](); return names == 0; }\n"  # so that they are linked
    )
    sources = [ROOT / "src" / "firstloss" / "rng" / f"{name}.c" for name in ("_jump", "_counter")]
    compile_for("aarch64-linux-musl", "-static", *flags, *sources, main, "-o", folder / "program")
    return Emulator(folder / "program")


def test_jumps_have_the_same_bits(emulator):
    window = np.random.default_rng(0).integers(0, 1 << 32, 624, np.uint32)
    for count in (1, 227, 623, 624, 5000):
        result = np.empty(624, np.uint32)
        emulator.call("firstloss_generate", window, count, result)
        assert np.array_equal(result, jump.native_generate(window, count))
    offsets = np.sort(np.random.default_rng(1).integers(0, jump._TABLE_WORDS - 624, 50))
    table, result = np.zeros(jump._TABLE_WORDS, np.uint32), np.empty(624, np.uint32)
    emulator.call("firstloss_jump", window, offsets, len(offsets), jump._GROUP, table, result)
    assert np.array_equal(result, jump.native_jump(window, offsets))


@pytest.mark.parametrize("kind, first, second", [("normal", 0.0, 0.02), ("normal", -1.5, 3.0), ("uniform", -0.1, 0.7)])
@pytest.mark.parametrize("begin, count", [(0, 1), (3, 1000), (2**40 + 1, 4097)])
def test_the_counter_policy_has_the_same_bits(emulator, kind, first, second, begin, count):
    out = np.empty(count, np.float32)
    emulator.call(f"firstloss_counter_{kind}", out, 1234567890123, 7, begin, count, first, second)
    assert out.tobytes() == getattr(counter, kind)(1234567890123, 7, begin, count, first, second).tobytes()
