"""How the step is written: a function, a closure, a method, with helpers, decorated."""

from __future__ import annotations

from .draft import Draft, block

FORMS = ["function"] * 7 + ["method"] * 6 + ["module"] * 4
FORMS += ["lambda", "nested", "partial", "partial with arguments", "decorated", "static", "class method", "callable"]
FORMS += [
    "bound method",
    "inherited",
    "generator helper",
    "try",
    "keyword",
    "defaults",
    "context",
    "dict batch",
    "star",
]
FORMS += ["numbers"]


def step(d: Draft, body: list[str], result: str) -> tuple[list[str], list[str], str]:
    """The step's text: what comes at the module's level, what comes in `program`, and the expression that calls it."""
    declared = [f"nonlocal {', '.join(d.free)}"] if d.free and d.form != "module" else []
    declared += [f"global {', '.join(d.module)}"] if d.module else []
    text = "\n".join([*map(block, body), result]).replace("$", "self." if d.form == "method" else "")

    def function(head: str, before: str = "", body: str = text, after: str = "") -> str:
        """A function of that head; `before` and `after` are lines around the step's own, which may be a block's."""
        indent = before.endswith(":")
        lines = [*declared, *([before] if before else []), block(body, int(indent)), *([after] if after else [])]
        return head + "\n" + block("\n".join(lines), 1)

    def traced(head: str, before: str = "", body: str = text, after: str = "") -> str:
        return "@fl.trace\n" + function(head, before, body, after)

    work = function("def work(x, y):")
    match d.form:
        case "method":
            fields = "\n".join([f"self.{k} = {k}" for k in ("m", "o", "c")] + d.fields).replace("$", "")
            definition = f"class Trainer:\n    def __init__(self):\n{block(fields, 2)}\n\n" + block(
                traced("def step(self, x, y):"), 1
            )
            return [], [definition, "trainer = Trainer()"], "trainer.step(x, y)"
        case "module":
            return [traced("def step(x, y):")], [], "step(x, y)"
        case "lambda":
            return [], [work, "step = fl.trace(lambda x, y: work(x, y))"], "step(x, y)"
        case "nested":
            inner = function("def inner(x, y):")
            return [], [f"@fl.trace\ndef step(x, y):\n{block(inner, 1)}\n    return inner(x, y)"], "step(x, y)"
        case "partial":
            return [], [work, "step = fl.trace(functools.partial(work))"], "step(x, y)"
        case "partial with arguments":
            step = function("def work(scale, x, y, shift=0.0):", "x, y = x * 1, y * scale + shift")
            return [], [step, "step = fl.trace(functools.partial(work, 0.5, shift=0.1))"], "step(x, y)"
        case "decorated":
            counted = (
                "def counted(f):\n    @functools.wraps(f)\n    def g(*args):\n        g.calls += 1\n"
                "        return f(*args)\n\n    g.calls = 0\n    return g"
            )
            return [counted], ["@fl.trace\n@counted\n" + function("def step(x, y):")], "step(x, y)"
        case "static":
            method = "@staticmethod\n" + traced("def step(x, y):")
            return [], ["class Steps:\n" + block(method, 1)], "Steps.step(x, y)"
        case "class method":
            method = "@classmethod\n" + function("def step(cls, x, y):", "cls.calls += 1")
            return (
                [],
                ["class Steps:\n    calls = 0\n\n" + block(method, 1), "step = fl.trace(Steps.step)"],
                "step(x, y)",
            )
        case "callable":
            method = function("def __call__(self, x, y):", "self.calls += 1")
            owner = "class Steps:\n    def __init__(self):\n        self.calls = 0\n\n" + block(method, 1)
            return [], [owner, "steps = Steps()\nstep = fl.trace(steps)"], "step(x, y)"
        case "bound method":
            method = function("def step(self, x, y):", "self.calls += 1")
            owner = "class Steps:\n    def __init__(self):\n        self.calls = 0\n\n" + block(method, 1)
            return [], [owner, "steps = Steps()\nstep = fl.trace(steps.step)"], "step(x, y)"
        case "inherited":
            base = "class Base:\n    gain = 1.0\n\n" + block(traced("def step(self, x, y):", "y = y * self.gain"), 1)
            d.at("Base.gain = 0.5" if d.chance(0.5) else "trainer.gain = 0.5")
            return [], [base, "class Trainer(Base):\n    pass", "trainer = Trainer()"], "trainer.step(x, y)"
        case "generator helper":
            helper = "def rows(out, y):\n    for k in range(3):\n        yield (out[:, k] - y[:, k]) ** 2"
            rows = text.replace("loss = ((out - y) ** 2).mean()", "loss = sum(r.mean() for r in rows(out, y)) / 3")
            return [helper], [traced("def step(x, y):", body=rows)], "step(x, y)"
        case "try":
            return (
                [],
                ["done = []", traced("def step(x, y):", "try:", after="finally:\n    done.append(1)")],
                "step(x, y)",
            )
        case "keyword":
            return [], [traced("def step(x, *, y):")], "step(x, y=y)"
        case "defaults":
            kept = text.replace("loss.backward()", "seen.append(0)\nloss = loss * gain\nloss.backward()", 1)
            call = d.pick("step(x, y)", "step(x, y, gain=1.0 + (i > 4))", "step(x, y, [])", "step(x, y, [], gain=i)")
            return [], [traced("def step(x, y, seen=[], gain=2.0):", body=kept)], call
        case "context":
            helper = (
                "@contextlib.contextmanager\ndef region(log):\n    log.append('in')\n    yield\n    log.append('out')"
            )
            return [helper], ["regions = []", traced("def step(x, y):", "with region(regions):")], "step(x, y)"
        case "dict batch":
            return [], [traced("def step(batch):", "x, y = batch['x'], batch['y']")], "step({'x': x, 'y': y})"
        case "star":
            return [], [traced("def step(*batch):", "x, y = batch")], "step(x, y)"
        case "numbers":
            step = traced("def step(x, y, scale, name):", "y = y * scale\nif name == 'b':\n    y = y * 2")
            return (
                [],
                [step],
                f"step(x, y, {d.pick('1.0', 'i', '0.5 * (i % 2)')}, {d.pick(repr('a'), repr('ab') + '[i % 2]')})",
            )
        case _:
            return [], [traced("def step(x, y):")], "step(x, y)"
