"""Random training programs: a small model, an optimizer, a traced step that keeps Python state, events between steps.

`generate(seed)` is a program's text; `check(source)` runs it eagerly and traced.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

from .events import event
from .forms import FORMS, step
from .models import model
from .optimizers import optimizer
from .oracle import check
from .pieces import PIECES, RARE
from .program_builder import STEPS, Draft, block, imports

__all__ = ["check", "generate"]

_FOOTER = """if __name__ == "__main__":  # from the root of the repository, with PYTHONPATH=.:src
    from tests.fuzz.oracle import main

    main(__file__)
"""


ALWAYS = "FIRSTLOSS_FUZZ_PIECES"  # set in the environment: names of pieces that each program has


def generate(seed: int) -> str:
    """The program of `seed`, always the same text on any machine."""
    rng = random.Random(f"steps {seed}")
    d = Draft(rng, form=rng.choice(FORMS), double=rng.random() < 0.7)
    model(d)
    optimizer(d)
    for piece in os.environ.get(ALWAYS, "").split():
        _add(d, next(candidate for candidate in PIECES if candidate.__name__ == piece))
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        _add(d, rng.choice(PIECES))
    if rng.random() < 0.015:
        _add(d, rng.choice(RARE))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        event(d)
    return _text(d, seed)


def _add(d: Draft, piece: Callable[[Draft], None]) -> None:
    d.pieces.append(piece.__name__)
    piece(d)


def _loop(d: Draft, body: str) -> list[str]:
    """The loop around the step: over a range, or over a loader's batches."""
    seeded = "g = torch.Generator().manual_seed(1)"
    if d.chance(0.85):
        return ["n = 6", seeded, f"for i in range({STEPS}):\n{block(body, 1)}"]
    batch = ", ".join(line.partition(" = ")[2].replace("(n,", "(6,") for line in d.batch)
    body = "\n".join(line for line in body.splitlines() if line not in d.batch)
    return [
        f"def batches():\n    {seeded}\n    return [({batch}) for _ in range({STEPS})]",
        "loader = fl.utils.data.DataLoader(batches)",
        d.pick("executor = loader", f"executor = fl.utils.data.DataExecutor(loader, num_steps={STEPS})"),
        f"for i, (x, y) in enumerate(executor):\n{block(body, 1)}",
        "del loader, executor",
    ]


def _text(d: Draft, seed: int) -> str:
    returned = d.pick(*["loss"] * 6, "loss, out", "pair", "dict", "detached")
    result = {
        "loss": "return loss",
        "loss, out": "return loss, out.detach()",
        "pair": "return [loss, {'out': out}]",
        "dict": "return {'loss': loss, 'mean': out.mean()}",
        "detached": "return loss.detach()",
    }[returned]
    if d.results:
        result, returned = f"return {', '.join(['loss', *d.results])}", "loss, out"
    early = result.replace("return loss", "return loss.detach()") if returned != "detached" else result
    d.mid = [text.replace("@early", early) for text in d.mid]
    body = [
        *d.pre,
        "out = $c(x)",
        d.pick(
            *["loss = ((out - y) ** 2).mean()"] * 3,
            "loss = F.mse_loss(out, y)",
            "loss = F.cross_entropy(out, y.argmax(1))",
        )
        if d.form != "generator helper"
        else "loss = ((out - y) ** 2).mean()",
        *d.mid,
        "loss.backward()",
        *d.grads,
        *d.update,
        *d.post,
    ]
    top, inside, call = step(d, body, result)
    loop = []
    for i in range(STEPS):
        loop += [f"if i == {i}:\n{block(text, 1)}" for text in d.between.get(i, [])]
    d.rng.shuffle(d.each)
    take = {
        "loss": "loss = result",
        "detached": "loss = result",
        "loss, out": "loss = result[0]",
        "pair": "loss = result[0]",
        "dict": "loss = result['loss']",
    }
    keep_losses = d.pick(
        "losses.append(loss)",
        "losses.append(loss)",
        "losses.append(loss.detach().clone())",
        "losses.append(torch.tensor(loss.item()))",
    )
    call = f"result = {call}"
    if d.catches:
        call = f"try:\n    {call}\nexcept BadBatch as error:\n    losses.append(str(error))\n    continue"
    body_of_loop = "\n".join([*d.batch, *loop, *d.each, call, take[returned], keep_losses, *d.after])
    statements = [
        *(["torch.set_default_dtype(torch.float64)"] if d.double else []),
        *d.early,
        *d.construct,
        "c = fl.compile(m, b)",
        *d.setup,
        *inside,
        "losses = []",
        *_loop(d, body_of_loop),
        *d.end,
        "return locals()",
    ]
    shared = list(d.module)
    if d.form == "module":
        shared += [n for n in dict.fromkeys([*d.names, "m", "o", "c"]) if n not in shared]
    if shared:
        statements.insert(0, f"global {', '.join(dict.fromkeys(shared))}")
    program = "def program(b):\n" + "\n".join(block(s, 1) for s in statements)
    definitions = "\n\n\n".join([*d.top, *top, program])
    header = "\n".join(
        [*imports(definitions), "", "import torch", "from torch import nn", "", "import firstloss as fl"]
    ).strip()
    title = f'"""Program {seed} of tests.fuzz.steps: {", ".join([d.form, *d.pieces])}."""'
    return f"{title}\n\n{header}\n\n\n{definitions}\n\n\n{_FOOTER}"
