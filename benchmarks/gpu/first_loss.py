"""Time to first loss, and later step times, of one way to train a Llama; each in a fresh process."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any

SIDES = ("eager", "graph", "xla", "compile by block", "compile whole")
_GROUP = 4  # steps between two waits
_LEARNING_RATE = 1e-4


def train(side: str, size: str, limit: float, tiny: bool) -> dict[str, Any]:
    """Train until the speed is known or `limit` seconds are over.

    Returns seconds from the start of the process to the first loss and to the end of each group of steps, and the
    losses.
    """
    began = float(os.environ.get("FIRSTLOSS_BEGAN") or time.time())
    import torch

    from benchmarks.gpu.llama import CONFIGS, Llama

    config = CONFIGS["tiny" if tiny else size]
    gpu = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = {"8B": 1, "1.1B": 4}.get(size, 1)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocabulary, (batch, config.sequence + 1), generator=generator)
    tokens, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    call: Any
    if side == "xla":
        call = _traced("XLA", config, tokens, targets)
    elif side == "graph":
        call = _traced("GPU", config, tokens.to(gpu), targets.to(gpu))
    else:
        with gpu:
            model: Any = Llama(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
        how = {"backend": "aot_eager"} if tiny else {}
        if side == "compile by block":
            for layer in model.layers:
                layer.compile(**how)
        elif side == "compile whole":
            model = torch.compile(model, **how)
        tokens, targets = tokens.to(gpu), targets.to(gpu)

        def call() -> Any:
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    losses, ends = [], []
    while True:
        loss: Any = None
        group = 1 if len(ends) < 4 else _GROUP
        for _ in range(group):
            loss = call()
        losses.append(float(loss))
        ends.append((time.time() - began, group))
        if len(ends) >= (8 if tiny else 16) or ends[-1][0] > limit:
            break
    each = [(b[0] - a[0]) / b[1] for a, b in zip(ends, ends[1:], strict=False)]
    steady = statistics.median(each[-len(each) // 2 :]) if each else None
    reached = None
    if steady is not None:
        reached = next((ends[i][0] for i, s in enumerate(each) if all(x <= 1.1 * steady for x in each[i:])), None)
    return {
        "first loss": ends[0][0],
        "step": steady,
        "steady after": reached,
        "losses": losses,
        "ends": ends,
        "memory": torch.cuda.max_memory_allocated() if gpu.type == "cuda" else None,
        "ok": all(loss == loss for loss in losses),
        **_said(side),
    }


_step: Any = None


def _said(side: str) -> dict[str, Any]:
    """How the GPU backend has run its steps."""
    return {"how": _step.how()} if side == "graph" and _step is not None else {}


def _traced(name: str, config: Any, tokens: Any, targets: Any) -> Any:
    """The step of a backend of Firstloss."""
    global _step
    import torch

    import firstloss as fl
    from benchmarks.gpu.llama import Llama

    if name == "GPU" and not torch.cuda.is_available():
        from firstloss.runtime.backend import Backend

        name = "CPU"  # which is to do as a GPU does, but for the graph
        Backend.replays = property(lambda self: True)  # type: ignore[assignment, method-assign]
    backend = fl.backend(name, artifact_dir=tempfile.mkdtemp())
    with backend.device:
        model = Llama(config)
    compiled = fl.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, **({} if name == "XLA" else {"fused": True}))

    @fl.trace
    def step(tokens: Any, targets: Any) -> Any:
        loss = compiled(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    _step = step
    return lambda: step(tokens, targets)
