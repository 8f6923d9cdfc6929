"""The results as a table: goal, result, and whether the goal is met."""

from __future__ import annotations

from typing import Any

_SIDES = ("eager", "graph", "xla", "compile by block", "compile whole")


def table(results: dict[str, Any]) -> str:
    """In Markdown."""
    parts = results["parts"]
    device = parts.get("device", {})
    about = [
        f"Device: {device.get('device', 'not known')}",
        f"driver {device['driver']}" if device.get("driver") else "",
        f"torch {device.get('torch')}, jax {device.get('jax')}, Python {device.get('python')}",
        f"commit {results['commit']}, {results['at']}",
    ]
    lines = [". ".join(filter(None, about)) + ".", ""]
    if results["tiny"]:
        lines += ["Tiny models on a CPU: these figures say that the command works, and nothing of a GPU.", ""]
    lines += ["| what | found | at least | |", "| --- | --- | --- | --- |"]
    for what, found, goal, met in rows(parts):
        met = None if results["tiny"] else met
        lines.append(f"| {what} | {found} | {goal} | {'' if met is None else 'met' if met else 'not met'} |")
    failed = [f"{name}: {_words(part)}" for name, part in parts.items() if not part["ok"]]
    if failed:
        lines += ["", "Parts that failed:", "", *(f"* {line}" for line in failed)]
    return "\n".join(lines) + "\n"


def _words(part: dict[str, Any]) -> str:
    error = part.get("error")
    if not error:
        return "; ".join(part["report"][-4:]) if "report" in part else "its bits are not those of eager PyTorch"
    return str(error).strip().splitlines()[-1].replace("|", "/")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def rows(parts: dict[str, Any]) -> list[tuple[str, str, str, bool | None]]:
    """(what, found, goal, whether it is met)."""
    found: list[tuple[str, str, str, bool | None]] = []
    if "alike" in (probe := parts.get("probe", {})):
        alike = [name for name, yes in probe["alike"].items() if yes]
        words = f"{len(alike)} of {len(probe['alike'])}"
        words += f"; not {', '.join(probe['refused'])}" if probe["refused"] else ""
        found.append(("kinds of fills whose bits our kernels have on this device", words, "float32's", probe["ok"]))
    if "seconds" in (bits := parts.get("cpu bits", {})):
        goal = bits["seconds"] <= 0.1 and bits["same bits"]
        words = f"{_ms(bits['seconds'])} ({_ms(bits['first'])} the first time; capture {_ms(bits['capture'])})"
        found.append(("float32 with the CPU's bits, made on the GPU", words, "100 ms, the CPU's bits", goal))
    for name in ("bfloat16", "float32"):
        one = parts.get(f"construct {name}", {})
        if "ours" not in one:
            continue
        found.append((f"{name} under torch.device('cuda'): eager", _ms(one["eager"]), "", None))
        found.append((f"{name}: meta, to_empty, init_weights", _ms(one["meta, to_empty, init_weights"]), "", None))
        fast = one["ours"] <= one["eager"] and one["same bits"]
        words = f"{_ms(one['ours'])} (of which capture {_ms(one['capture'])}), "
        words += f"{'the same' if one['same bits'] else 'OTHER'} bits"
        found.append((f"{name}: Firstloss", words, "eager's time and bits", fast))
        floor = one["floor"] / 8
        made = one["an eighth made in"]
        words = f"{_ms(made)} after capture, {made / one['made in']:.2f} of all, {made / floor:.1f} times the floor"
        good = made <= max(one["made in"] / 8, 2 * floor) and one["same bits of the eighth"]
        found.append((f"{name}: one rank of 8", words, "an eighth of the time, 2 times bytes over bandwidth", good))
    if "hashes" in (hashes := parts.get("one hash", {})):
        count = len(set(hashes["hashes"].values()))
        words = f"{count} of {len(hashes['hashes'])} ({', '.join(hashes['hashes'])})"
        found.append(("hashes of all weights", words, "one hash", count == 1))
    for size in ("1.1B", "8B"):
        sides = {side: parts.get(f"first loss {size} {side}", {}) for side in _SIDES}
        eager = sides["eager"].get("first loss")
        compiled = [sides[s]["step"] for s in ("compile whole", "compile by block") if sides[s].get("step")]
        steady = [s["steady after"] for n, s in sides.items() if n.startswith("compile") and s.get("steady after")]
        for side, one in sides.items():
            if "first loss" not in one:
                continue
            ours = side in ("graph", "xla")
            words = _ms(one["first loss"]) + (f", {one['first loss'] / eager:.2f} of eager's" if eager else "")
            met = one["first loss"] <= 1.1 * eager if ours and eager else None
            label = f"{size}, {side}" + (f" ({one['how']})" if one.get("how") else "")
            found.append((f"{label}: first loss", words, "1.1 of eager's" if ours else "", met))
            if one.get("step"):
                words = f"{1 / one['step']:.3g} steps/s"
                words += f", steady after {_ms(one['steady after'])}" if one.get("steady after") else ""
                fast = one["step"] <= min(compiled) if ours and compiled else None
                if fast and steady and one.get("steady after"):
                    fast = one["steady after"] <= min(steady)
                found.append((f"{label}: after that", words, "torch.compile's, sooner" if ours else "", fast))
    if "report" in (tests := parts.get("tests", {})):
        words = tests["report"][-1].strip("= ") if tests["report"] else ""
        found.append(("tests marked gpu", words, "all", tests["ok"]))
    return found
