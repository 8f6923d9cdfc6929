"""One training step of small models from three zoos, compiled, against eager PyTorch: the loss and every gradient.

    python -m tests.lower.model_steps                         # all without an outcome, hours; writes the page
    python -m tests.lower.model_steps transformers --only bert
    python -m tests.lower.model_steps --table                 # regenerate the page from stored outcomes

Each model runs in a process of its own, with a time limit. Its outcome replaces its row in docs/model-steps.jsonl, from
which docs/model-steps.md is generated; a model that has an outcome is run again only if it is named.

model_rounding.py defines which results count as the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import firstloss as fl
from benchmarks.sweep_constructors import prepare

from .model_cases import ZOOS, Case, loss_of, silence
from .model_page import keep, read_rows, write_page
from .model_rounding import BETAS, RATE, Step, Tensors, judge, judge_update, nudge

Examine = Callable[[str, str, str], dict[str, Any]]  # from a zoo, a model's name and a folder, its outcome


def train(case: Case, dtype: torch.dtype | None = None, nudged: int | None = None) -> tuple[Tensors, Step]:
    """The initial weights, and one step of eager PyTorch."""
    torch.manual_seed(0)
    model = silence(case.build()).train()
    torch.manual_seed(1)
    batch = case.batch(model)
    if dtype is not None:
        model, batch = model.to(dtype), tree_map(lambda x: _cast(x, dtype), batch)
    if nudged is not None:
        nudge(model, nudged)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS)
    loss = loss_of(model(**batch))
    loss.backward()
    optimizer.step()
    return before, collect(loss, model)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def train_compiled(case: Case, artifacts: str, dtype: torch.dtype | None = None) -> tuple[Step, dict[str, float]]:
    """The same step, deferred, traced and compiled; and its seconds by phase."""
    backend = fl.backend("XLA", artifact_dir=artifacts)
    torch.manual_seed(0)
    with backend.device:
        model = silence(case.build()).train()
        if dtype is not None:
            model = model.to(dtype)
    torch.manual_seed(1)
    batch = case.batch(model)
    if dtype is not None:
        batch = tree_map(lambda x: _cast(x, dtype), batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS)
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss = loss_of(compiled(**batch))
        loss.backward()
        optimizer.step()
        return loss

    loss = step(batch)
    loss.item()
    seconds = {name: fl.timeline.current().seconds(name) for name in ("trace", "lower", "compile")}
    return collect(loss, model), seconds


def collect(loss: torch.Tensor, model: nn.Module) -> Step:
    weights = dict(model.named_parameters())
    gradients = {name: w.grad.detach().clone() for name, w in weights.items() if w.grad is not None}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return Step(loss.item(), gradients, buffers, {name: w.detach().clone() for name, w in weights.items()})


def examine(zoo: str, name: str, artifacts: str) -> dict[str, Any]:
    """The outcome of one model's step."""
    case = ZOOS[zoo][1](name)
    out: dict[str, Any] = {"zoo": zoo, "name": name, "verdict": "same", "why": ""}
    began = time.perf_counter()
    try:
        before, eager = train(case)
    except Exception as error:
        return {**out, "verdict": "left out", "why": f"eager: {type(error).__name__}: {error}"[:300]}
    out["tensors"] = len(eager.gradients)
    out["weights"] = sum(w.numel() for w in before.values())
    if not eager.gradients:
        return {**out, "verdict": "left out", "why": "eager: no parameter has a gradient"}
    try:
        compiled, out["seconds"] = train_compiled(case, artifacts)
    except Exception as error:
        return {**out, "verdict": "refused", "why": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}

    def again(seed: int | None) -> Step:
        return train(case, torch.float64 if seed is None else None, seed)[1]

    out["loss"], out["eager loss"] = compiled.loss, eager.loss
    judgement = judge(compiled, eager, again)
    out["worst"], out["distance"], out["allowed"] = judgement.worst, judgement.distance, judgement.allowed
    wrong = {**judgement.wrong, **judge_update(before, compiled)}
    if judgement.needs_float64():
        try:
            exact = judge(train_compiled(case, artifacts, torch.float64)[0], again(None), None)
        except Exception as error:
            return {**out, "verdict": "refused", "why": f"in float64: {type(error).__name__}: {error}"[:300]}
        wrong = {**exact.wrong, **judge_update(before, compiled)}
        out["why"] = f"in float64 `{exact.worst}` by {exact.distance:.0e}"
    if wrong:
        out["verdict"] = "differs"
        listed = ", ".join(f"{what} {how}" for what, how in list(wrong.items())[:4])
        out["why"] = f"loss {compiled.loss} for {eager.loss}; {len(wrong)} tensors: {listed}"
    out["total"] = round(time.perf_counter() - began, 1)
    return out


def _child(examine: Examine, zoo: str, name: str, connection: Any) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as artifacts:
        connection.send(examine(zoo, name, artifacts))
    connection.close()
    os._exit(0)


def in_child(examine: Examine, zoo: str, name: str, limit: float) -> dict[str, Any]:
    """Run one model in a process forked from this one, which has only imported modules."""
    parent_end, child_end = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(examine, zoo, name, child_end))
    process.start()
    child_end.close()
    out = {"zoo": zoo, "name": name, "verdict": "late", "why": f"no outcome within {limit:.0f} s"}
    try:
        if parent_end.poll(limit):
            out = parent_end.recv()
    except EOFError:
        out |= {"verdict": "refused", "why": "the process ended"}
    process.kill()
    process.join()
    return out


def is_known(zoo: str, name: str) -> bool:
    """Whether a model has an outcome by the current check and within its time limit."""
    row = read_rows().get((zoo, name), {"verdict": "late"})
    return row["verdict"] != "late" and not row.get("partly")


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Options that select models."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoos", nargs="*", metavar="ZOO", help=f"of {', '.join(ZOOS)} (default all)")
    parser.add_argument("--only", help="a regular expression: run these again")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a model may take")
    return parser


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--first", type=int, help="of each zoo, so many")
    parser.add_argument("--table", action="store_true", help="write the page from outcomes found before")
    options = parser.parse_args()
    prepare()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for zoo in options.zoos or ZOOS:
        if options.table:
            break
        import jax  # noqa: F401  # imported, and no more: its threads would not survive the fork

        import firstloss.runtime.step.compiled_step  # noqa: F401

        for name in ZOOS[zoo][0][: options.first]:
            if is_known(zoo, name) if options.only is None else not re.search(options.only, name):
                continue
            out = in_child(examine, zoo, name, options.limit)
            keep(out)
            write_page()
            far = f"{out.get('distance', 0):.0e} of {out.get('allowed', 0):.0e}"
            print(f"{zoo:12} {name:30} {out['verdict']:9} {far} {out['why'][:250]}", flush=True)
    write_page()


if __name__ == "__main__":
    main()
