"""How the step is written: a function, a closure, a method, with helpers, decorated."""

# ruff: noqa: E501 - a line of a generated program is one line here
from __future__ import annotations

from .draft import Draft, block

FORMS = (
    ["function"] * 6
    + ["method"] * 5
    + ["module"] * 3
    + ["lambda", "nested", "partial", "decorated", "static", "class method", "callable", "generator helper", "try"]
    + ["keyword", "defaults", "context", "dict batch", "star"]
)


def step(d: Draft, body: list[str], result: str) -> tuple[list[str], list[str], str]:
    """The step's text: what comes at the module's level, what comes in `program`, and the expression that calls it."""
    text = "\n".join(block(part) for part in body)
    free = f"nonlocal {', '.join(d.free)}\n" if d.free else ""
    free += f"global {', '.join(d.module)}\n" if d.module else ""
    if d.form == "method":
        text = text.replace("$", "self.")
        fields = "\n".join([f"self.{k} = {k}" for k in ("m", "o", "c")] + d.fields).replace("$", "")
        # class bodies see nonlocals of program
        definition = (
            "class Trainer:\n    def __init__(self):\n"
            + block(fields, 2)
            + "\n\n    @fl.trace\n    def step(self, x, y):\n"
            + block(f"{free}{text}\n{result}", 2)
        )
        return [], [definition, "trainer = Trainer()"], "trainer.step(x, y)"
    text = text.replace("$", "")
    inner = f"{free}{text}\n{result}"
    if d.form == "module":
        module_globals = f"global {', '.join(d.module)}\n" if d.module else ""
        definition = f"@fl.trace\ndef step(x, y):\n{block(module_globals + text + chr(10) + result, 1)}"
        return [definition], [], "step(x, y)"
    plain = f"def work(x, y):\n{block(inner, 1)}"
    if d.form == "lambda":
        return [], [plain, "step = fl.trace(lambda x, y: work(x, y))"], "step(x, y)"
    if d.form == "nested":
        return (
            [],
            [f"@fl.trace\ndef step(x, y):\n{block(plain.replace('work', 'inner'), 1)}\n    return inner(x, y)"],
            "step(x, y)",
        )
    if d.form == "partial":
        return [], [plain, "step = fl.trace(functools.partial(work))"], "step(x, y)"
    if d.form == "decorated":
        deco = "def counted(f):\n    @functools.wraps(f)\n    def g(*args):\n        g.calls += 1\n        return f(*args)\n    g.calls = 0\n    return g"
        return [deco], [f"@fl.trace\n@counted\n{plain.replace('def work', 'def step')}"], "step(x, y)"
    if d.form == "static":
        return (
            [],
            [f"class Steps:\n    @staticmethod\n    @fl.trace\n{block(plain.replace('def work', 'def step'), 1)}"],
            "Steps.step(x, y)",
        )
    if d.form == "class method":
        return (
            [],
            [
                f"class Steps:\n    scale = 1.0\n\n    @classmethod\n    def step(cls, x, y):\n{block(inner, 2)}",
                "step = fl.trace(Steps.step)",
            ],
            "step(x, y)",
        )
    if d.form == "callable":
        return (
            [],
            [
                f"class Steps:\n    def __init__(self):\n        self.calls = 0\n\n    def __call__(self, x, y):\n        self.calls += 1\n{block(inner, 2)}",
                "step = fl.trace(Steps())",
            ],
            "step(x, y)",
        )
    if d.form == "generator helper":
        helper = "def rows(out, y):\n    for k in range(3):\n        yield (out[:, k] - y[:, k]) ** 2"
        inner = inner.replace("loss = ((out - y) ** 2).mean()", "loss = sum(r.mean() for r in rows(out, y)) / 3")
        return [helper], [f"@fl.trace\ndef step(x, y):\n{block(inner, 1)}"], "step(x, y)"
    if d.form == "try":
        return (
            [],
            [
                f"done = []\n@fl.trace\ndef step(x, y):\n{block(free, 1) if free else '    pass'}\n    try:\n{block(text + chr(10) + result, 2)}\n    finally:\n        done.append(1)"
            ],
            "step(x, y)",
        )
    if d.form == "keyword":
        return [], [f"@fl.trace\n{plain.replace('def work(x, y)', 'def step(x, *, y)')}"], "step(x, y=y)"
    if d.form == "defaults":
        return (
            [],
            [
                f"@fl.trace\n{plain.replace('def work(x, y)', 'def step(x, y, gain=2.0, seen=[])')}".replace(
                    "loss.backward()", "seen.append(0)\n    loss = loss * gain\n    loss.backward()"
                )
            ],
            "step(x, y)" if d.chance(0.5) else "step(x, y, gain=1.0 + (i > 4))",
        )
    if d.form == "context":
        helper = "@contextlib.contextmanager\ndef region(log):\n    log.append('in')\n    yield\n    log.append('out')"
        return (
            [helper],
            [
                f"regions = []\n@fl.trace\ndef step(x, y):\n{block(free, 1) if free else '    pass'}\n    with region(regions):\n{block(text + chr(10) + result, 2)}"
            ],
            "step(x, y)",
        )
    if d.form == "dict batch":
        return (
            [],
            [
                f"@fl.trace\n{plain.replace('def work(x, y):', 'def step(batch):').replace('def step(batch):', 'def step(batch):' + chr(10) + (block(free, 1) if free else '    pass') + chr(10) + '    x, y = batch[' + repr('x') + '], batch[' + repr('y') + ']', 1).replace(block(free, 1) + chr(10), '', 0)}".replace(
                    inner, inner[len(free) :]
                )
                if not free
                else f"@fl.trace\ndef step(batch):\n{block(free, 1)}\n    x, y = batch['x'], batch['y']\n{block(text + chr(10) + result, 1)}"
            ],
            "step({'x': x, 'y': y})",
        )
    if d.form == "star":
        return (
            [],
            [
                f"@fl.trace\ndef step(*batch):\n{block(free, 1) if free else '    pass'}\n    x, y = batch\n{block(text + chr(10) + result, 1)}"
            ],
            "step(x, y)",
        )
    return [], [f"@fl.trace\n{plain.replace('def work', 'def step')}"], "step(x, y)"
