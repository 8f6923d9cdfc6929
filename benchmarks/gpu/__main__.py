"""`make gpu`: the tests and benchmarks that need a GPU, most important first, with results as JSON and as a table.

Each part is a separate process with its own time limit, and may fail without stopping the others. Without a GPU the
same command runs a tiny form of everything on the CPU, so that on a GPU machine only the device is new.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Part(NamedTuple):
    """One process: its name, its time limit in seconds, and which half of the run it belongs to."""

    name: str
    limit: int
    half: int = 1


PARTS = [
    Part("device", 60),
    Part("probe", 90),
    Part("cpu bits", 90),
    Part("construct bfloat16", 100),
    Part("construct float32", 100),
    Part("one hash", 90),
    Part("tests", 150),
    *(Part(f"first loss 1.1B {side}", 75) for side in ("eager", "graph", "xla", "compile by block", "compile whole")),
    *(Part(f"first loss 8B {side}", 110, 2) for side in ("eager", "graph", "xla", "compile by block", "compile whole")),
]


def run(name: str, tiny: bool, limit: float) -> dict[str, Any]:
    """What a part finds, in its own process."""
    if name == "device":
        return _device(tiny)
    if name == "tests":
        return _tests(limit)
    from benchmarks.gpu import weights

    if name == "probe":
        return weights.probe(tiny)
    if name == "cpu bits":
        return weights.cpu_bits(tiny)
    if name == "one hash":
        return weights.one_hash(tiny)
    if name.startswith("construct "):
        import torch

        return weights.construct(tiny, getattr(torch, name.split()[1]))
    from benchmarks.gpu import first_loss

    _, _, size, side = name.split(" ", 3)
    return first_loss.train(side, size, 0.7 * limit, tiny)


def _device(tiny: bool) -> dict[str, Any]:
    import torch

    from benchmarks.gpu.weights import bandwidth

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    try:
        import jax

        found["jax"] = jax.__version__
        found["jax devices"] = [str(d) for d in jax.devices()]
    except Exception as error:
        found["jax"] = f"not there: {error}"
    if torch.cuda.is_available():
        of = torch.cuda.get_device_properties(0)
        found["device"] = of.name
        found["multiprocessors"] = of.multi_processor_count
        found["memory"] = of.total_memory
        found["cuda"] = torch.version.cuda
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    else:
        found["device"] = "no GPU: the tiny form, on the CPU"
    try:
        from firstloss.gpu import nvrtc

        found["nvrtc"] = ".".join(map(str, nvrtc.version()))
    except Exception as error:
        found["nvrtc"] = str(error)
    found["write bandwidth"] = bandwidth((1 << 24) if tiny else (4 << 30))
    found["ok"] = True
    return found


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _tests(limit: float) -> dict[str, Any]:
    """Where there is no GPU they are all skipped; what they share is tried by the other tests in their folder."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE"]
    command += ["tests/gpu", "tests/init/test_cuda.py", "tests/init/test_dtensor_on_gpus.py"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit - 5)
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        return {"report": said.splitlines()[-25:], "error": "ran past its limit", "ok": False}
    return {"report": done.stdout.splitlines()[-25:], "errors": done.stderr[-2000:], "ok": done.returncode == 0}


def _file(part: Part, kind: str) -> str:
    return f"{part.name.replace(' ', '_')}.{kind}"


def in_process(part: Part, tiny: bool, folder: Path) -> dict[str, Any]:
    """Run a part in a process group of its own; what it left of a result, an error, or that it ran past its limit."""
    result = folder / _file(part, "json")
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part.name, "--into", str(result)]
    command += ["--tiny"] if tiny else []
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FIRSTLOSS_BEGAN": str(time.time())}
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch has its share of the GPU's memory
    log = folder / _file(part, "log")
    began = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(part.limit)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found: dict[str, Any] = {"ok": False}
    if result.exists():
        found = json.loads(result.read_text())
    if status:
        found["ok"] = False
        found["error"] = "ran past its limit" if status == -1 else log.read_text()[-3000:]
    found["took"] = time.perf_counter() - began
    return found


def commit() -> str:
    """Of the checkout; what travelled to another machine without its history has none."""
    return (
        os.environ.get("FIRSTLOSS_COMMIT")
        or _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
        or "unknown"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model; as where there is no GPU")
    parser.add_argument(
        "--out", default=os.environ.get("OUT", "gpu-results"), help="the folder for gpu.json and gpu.md"
    )
    parser.add_argument(
        "--half", type=int, choices=(1, 2), help="the first or the second half, of under 10 minutes each"
    )
    parser.add_argument("--seconds", type=float, help="begin no part that might end after this")
    parser.add_argument("--only", action="append", help="a part whose name begins so (may be repeated)")
    parser.add_argument("--docs", metavar="JSON", nargs="+", help="write earlier results to docs/measurements.md")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.seconds = args.seconds or (1190.0 if args.half is None else 570.0)
    if args.docs:
        return write_docs([Path(path) for path in args.docs])
    if args.part:
        limit = next(part.limit for part in PARTS if part.name == args.part)
        found = run(args.part, args.tiny, limit)
        Path(args.into).write_text(json.dumps(found))
        return 0
    import torch

    from benchmarks.gpu.table import table

    tiny = args.tiny or not torch.cuda.is_available()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    parts = Path(tempfile.mkdtemp())
    results: dict[str, Any] = {
        "commit": commit(),
        "tiny": tiny,
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    results["parts"] = {}
    began = time.perf_counter()
    for part in PARTS:
        if args.half and part.half != args.half and part.name != "device":
            continue
        if args.only and not any(part.name.startswith(name) for name in args.only):
            continue
        left = args.seconds - (time.perf_counter() - began)
        if left < min(part.limit, 30):
            results["parts"][part.name] = {"ok": False, "error": "not begun: no time was left"}
            continue
        part = part._replace(limit=int(min(part.limit, left)))
        print(f"{part.name} ...", flush=True)
        found = results["parts"][part.name] = in_process(part, tiny, parts)
        words = "ok" if found["ok"] else f"FAILED: {str(found.get('error', found))[-400:]}"
        print(f"  {words} ({found['took']:.1f} s)", flush=True)
        with (out / "gpu.log").open(
            "a"
        ) as log:  # all in few files, which are easily brought back from the GPU's machine
            log.write(f"== {part.name}\n{(parts / _file(part, 'log')).read_text()}\n")
        (out / "gpu.json").write_text(json.dumps(results, indent=1))
        (out / "gpu.md").write_text(table(results))
    print(table(results))
    return 0 if all(part["ok"] for part in results["parts"].values()) else 1


def write_docs(paths: list[Path]) -> int:
    """Put the table of results, of both halves perhaps, into docs/measurements.md."""
    from benchmarks.gpu.table import table

    results = json.loads(paths[0].read_text())
    for path in paths[1:]:
        results["parts"].update(json.loads(path.read_text())["parts"])
    page = ROOT / "docs" / "measurements.md"
    begin, end = "<!-- results -->\n", "<!-- end of results -->\n"
    before, rest = page.read_text().split(begin)
    page.write_text(before + begin + "\n" + table(results) + "\n" + end + rest.split(end)[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
