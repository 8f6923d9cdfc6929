"""The form of the step: a function, a closure, a method, with helpers, decorated."""

from __future__ import annotations

from collections.abc import Callable

from .program_builder import Draft, block

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
FORMS += ["numbers", "given dict", "given list", "given tensors", "given weights", "leaf argument", "same twice"]
FORMS += ["given dict", "given tensors", "given object", "given anew"]


def step(d: Draft, body: list[str], result: str) -> tuple[list[str], list[str], str]:
    """The step's text: the lines at module level, the lines in `program`, and the expression that calls the step."""
    declared = [f"nonlocal {', '.join(d.free)}"] if d.free and d.form != "module" else []
    declared += [f"global {', '.join(d.module)}"] if d.module else []
    text = "\n".join([*map(block, body), result]).replace("$", "self." if d.form == "method" else "")

    def function(head: str, before: str = "", body: str = text, after: str = "") -> str:
        """A function with the given head; `before`, which may open a block, and `after` surround the step's lines."""
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
        case "given dict" | "given list" | "given tensors" | "given weights" | "leaf argument" | "same twice":
            return _given(d, body, result, traced)
        case "given anew":
            return _given_anew(d, body, result, traced)
        case "given object":
            owner = "class Kept:\n    def __init__(self):\n        self.h = torch.zeros(3)\n        self.n = 0"
            more = _late(body, result, "given.h = given.h * 0.5 + out.detach().mean(0)\ngiven.n += 1")
            return [owner], ["given = Kept()", traced("def step(x, y, given):", body=more)], "step(x, y, given)"
        case _:
            return [], [traced("def step(x, y):")], "step(x, y)"


def _late(body: list[str], result: str, more: str) -> str:
    return "\n".join([*map(block, body), more, result]).replace("$", "")


def _given(d: Draft, body: list[str], result: str, traced: Callable[..., str]) -> tuple[list[str], list[str], str]:
    """Steps that use arguments other than `x` and `y`."""
    match d.form:
        case "given dict":
            start = "given = {'h': torch.zeros(3), 'n': torch.zeros(()), 'log': [], 'k': 0}"
            options = (
                "given['h'] = given['h'] * 0.5 + out.detach().mean(0)",
                "given['h'].mul_(0.5).add_(out.detach().mean(0))",
                "given['n'] += 1",
                "given['log'].append(loss.detach())",
                "given['log'].append(y[1])",
                "given['last'] = out.detach()",
                "given['best'] = given.get('best', given['h']) + given['h']",
                "given['k'] += 1",
                "given.pop('last', None)",
            )
            more = "\n".join(d.rng.sample(options, d.rng.randint(1, 4)))
            return [], [start, traced("def step(x, y, given):", body=_late(body, result, more))], "step(x, y, given)"
        case "given list":
            start = "given = [torch.zeros(3), torch.ones(3)]"
            options = (
                "given[0] = given[0] * 0.5 + out.detach().mean(0)",
                "given[0], given[1] = given[1], given[0]",
                "given[1] += out.detach().mean(0)",
                "given[:] = [given[1], out.detach().mean(0)]",
            )
            more = "\n".join(d.rng.sample(options, d.rng.randint(1, 3)))
            call = d.pick("step(x, y, given)", "step(x, given=given, y=y)")
            return [], [start, traced("def step(x, y, given):", body=_late(body, result, more))], call
        case "given tensors":
            start = d.pick("h = torch.zeros(3)", "h = torch.zeros(2, 3)[0]", "h = torch.zeros(3, 2)[:, 1]")
            options = (
                "h.mul_(0.5).add_(out.detach().mean(0))",
                "y.mul_(0.5)",
                "y[0] = 0.0",
                "h[1:] += y[0, 1:]",
                "h.copy_(y.mean(0))",
                "y.t()[1].zero_()",
            )
            more = "\n".join(d.rng.sample(options, d.rng.randint(1, 3)))
            at = d.rng.randint(0, len(body))
            text = "\n".join([*map(block, body[: max(at, 1)]), *map(block, body[max(at, 1) :]), more, result])
            if d.chance(0.5):
                d.each.append(d.pick("h = h * 0.9", "h = h.clone()", "older = h", "h = y[0] if i == 4 else h"))
            return [], [start, traced("def step(x, y, h):", body=text.replace("$", ""))], "step(x, y, h)"
        case "given weights":
            options = (
                "norm = sum((p.grad ** 2).sum() for p in params if p.grad is not None)",
                "with torch.no_grad():\n    for p in params:\n        p.mul_(0.99)",
                "for p in params:\n    p.grad = None",
            )
            more = "\n".join(d.rng.sample(options, d.rng.randint(1, 3)))
            call = d.pick("list(m.parameters())", "[m.z.weight]", "dict(m.named_parameters()).values()")
            step = traced("def step(x, y, params):", "params = list(params)", body=_late(body, result, more))
            return [], [step], f"step(x, y, {call})"
        case "leaf argument":
            more = d.pick("g = h.grad * 2", "h.grad = None", "pass", "with torch.no_grad():\n    h.sub_(h.grad)")
            d.mid.append("pass")
            start = d.pick("h = torch.ones(3).requires_grad_()", "h = torch.ones(3)")
            if "requires_grad" not in start:
                d.each.append("h = torch.ones(3).requires_grad_()")
            text = "\n".join([*map(block, body), more, result]).replace("$", "")
            text = text.replace("loss.backward()", "loss = loss + (h * out.mean(0)).sum()\nloss.backward()", 1)
            return [], [start, traced("def step(x, y, h):", body=text)], "step(x, y, h)"
        case _:
            more = "if h is y:\n    loss = loss.detach() * 2"
            call = d.pick("step(x, y, y)", "step(x, y, y if i % 2 else y.clone())", "step(x, y, y[:])")
            return [], [traced("def step(x, y, h):", body=_late(body, result, more))], call


def _given_anew(d: Draft, body: list[str], result: str, traced: Callable[..., str]) -> tuple[list[str], list[str], str]:
    """Steps that keep a container that is another at each call."""
    pair = "class Pair(typing.NamedTuple):\n    a: object\n    b: object"
    held = d.pick(
        "(i, y)", "(i,)", "(f'sample {i}', 'a')", "((i, 0.5 * i), x)", "[(i,)]", "torch.Size([i, 2])",
        "Pair(i, y)", "range(i)",
    )  # fmt: skip
    outer = d.pick("HELD", "(1, HELD)", "{'a': HELD}", "[HELD]", "Pair(HELD, i)")
    part = d.pick("given", "(given, 1)", "{'given': given}", "[given, given]")
    more = d.pick(f"kept.append({part})", f"kept[:] = [{part}]", f"kept.append({part})\nscale = 1 + 0.1 * len(given)")
    step = traced("def step(x, y, given):", body=_late(body, result, more))
    return [pair], ["kept = []", step], f"step(x, y, {outer.replace('HELD', held)})"
