"""One training step of small models of three zoos, compiled, against eager PyTorch: the loss and every gradient.

    python -m tests.lower.model_steps                         # all, over an hour; writes docs/model-steps.md
    python -m tests.lower.model_steps transformers --only bert
    python -m tests.lower.model_steps --table                 # the page again, from outcomes found before

Each model runs in a process of its own, with a limit on its time. Outcomes are kept in build/model_steps.jsonl; a model
that has one is not run again unless it is named.

Gradients are float32, and eager's own are off by rounding: in a network of many layers, or where a ReLU or a maximum
stands at a tie, by far more than an ulp. So a gradient passes if it is within 1e-4 of eager's, by norm, or no more than
four times as far from the float64 gradient as eager's is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import firstloss as fl
from benchmarks.sweep_constructors import prepare

from .model_cases import ZOOS, Case, loss_of, silence

ROOT = Path(__file__).parents[2]
OUTCOMES = ROOT / "build" / "model_steps.jsonl"
CLOSE = 1e-4  # of a gradient's norm
AS_EXACT = 4.0  # times eager's own distance from the float64 gradient
NOISE = 1e-6  # of the norm of all gradients together: what is smaller is rounding (a bias before a batch norm)


def train(case: Case, dtype: torch.dtype | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    """One step of eager PyTorch: its loss and gradients."""
    torch.manual_seed(0)
    model = silence(case.build()).train()
    torch.manual_seed(1)
    batch = case.batch(model)
    if dtype is not None:
        model = model.to(dtype)
        batch = {
            k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()
        }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = loss_of(model(**batch))
    loss.backward()
    optimizer.step()
    return loss.item(), gradients_of(model)


def train_compiled(case: Case, artifacts: str) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """The same step, deferred, traced and compiled; and its seconds by phase."""
    backend = fl.backend("XLA", artifact_dir=artifacts)
    torch.manual_seed(0)
    with backend.device:
        model = silence(case.build()).train()
    torch.manual_seed(1)
    batch = case.batch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss = loss_of(compiled(**batch))
        loss.backward()
        optimizer.step()
        return loss

    loss = step(batch).item()
    seconds = {name: fl.timeline.current().seconds(name) for name in ("trace", "lower", "compile")}
    return loss, gradients_of(model), seconds


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone().double() for name, p in model.named_parameters() if p.grad is not None}


def compare(
    ours: dict[str, torch.Tensor], eager: dict[str, torch.Tensor], exact: dict[str, torch.Tensor] | None
) -> tuple[float, list[str]]:
    """The largest distance between gradients, in norms of eager's, and the names of those that fail."""
    if set(ours) != set(eager):
        return float("inf"), sorted(set(ours) ^ set(eager))
    everything = sum(float(g.norm()) ** 2 for g in eager.values()) ** 0.5
    worst, wrong = 0.0, []
    for name, g in eager.items():
        size = float(g.norm()) + NOISE * everything / CLOSE
        distance = float((ours[name] - g).norm()) / size if size else float((ours[name]).norm())
        worst = max(worst, distance)
        if distance <= CLOSE:
            continue
        if exact is not None and name in exact:
            own = float((ours[name] - exact[name]).norm())
            if own <= AS_EXACT * float((g - exact[name]).norm()):
                continue
        wrong.append(f"{name} by {distance:.1e}")
    return worst, wrong


def examine(zoo: str, name: str, artifacts: str) -> dict[str, Any]:
    """What became of one model's step."""
    case = ZOOS[zoo][1](name)
    out: dict[str, Any] = {"zoo": zoo, "name": name, "verdict": "same", "why": ""}
    began = time.perf_counter()
    try:
        loss, eager = train(case)
    except Exception as error:
        return {**out, "verdict": "left out", "why": f"eager: {type(error).__name__}: {error}"[:300]}
    out["parameters"] = len(eager)
    if not eager:
        return {**out, "verdict": "left out", "why": "eager: no parameter has a gradient"}
    try:
        our_loss, ours, out["seconds"] = train_compiled(case, artifacts)
    except Exception as error:
        return {**out, "verdict": "refused", "why": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
    out["loss"], out["eager loss"] = our_loss, loss
    worst, wrong = compare(ours, eager, None)
    note = ""
    if wrong:
        try:
            exact_loss, exact = train(case, torch.float64)
            worst, wrong = compare(ours, eager, exact)
            note = "" if wrong else "no farther from float64 than eager"
        except Exception as error:
            note = f"no float64 run: {type(error).__name__}: {error}"[:200]
    out["worst"] = worst
    if wrong or abs(our_loss - loss) > 1e-5 * max(1.0, abs(loss)):
        out["verdict"] = "differs"
        note = f"loss {our_loss} for {loss}; {len(wrong)} of {len(eager)} gradients: {', '.join(wrong[:3])}; {note}"
    out["why"] = note
    out["total"] = round(time.perf_counter() - began, 1)
    return out


def _child(zoo: str, name: str, connection: Any) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as artifacts:
        connection.send(examine(zoo, name, artifacts))
    connection.close()
    os._exit(0)


def in_child(zoo: str, name: str, limit: float) -> dict[str, Any]:
    """One model in a process of its own, forked from this one, in which nothing but imports has happened."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(zoo, name, theirs))
    process.start()
    theirs.close()
    out = {"zoo": zoo, "name": name, "verdict": "refused", "why": f"no outcome within {limit:.0f} s"}
    try:
        if ours.poll(limit):
            out = ours.recv()
    except EOFError:
        out["why"] = "the process ended"
    process.kill()
    process.join()
    return out


def read_outcomes() -> dict[tuple[str, str], dict[str, Any]]:
    if not OUTCOMES.exists():
        return {}
    found = map(json.loads, OUTCOMES.read_text().splitlines())
    return {(o["zoo"], o["name"]): o for o in found}


def write_page(outcomes: dict[tuple[str, str], dict[str, Any]], path: Path) -> None:
    lines = [
        "# Training steps of model zoos",
        "",
        "<!-- Written by `python -m tests.lower.model_steps`. -->",
        "",
        "One step (forward, backward, AdamW) of small configurations, constructed deferred, traced and compiled,",
        "against eager PyTorch from the same seed: the loss within 1e-5, and every gradient within 1e-4 of its norm or",
        "no farther than four times eager's own distance from the gradient in float64. Dropout is 0, batches of two.",
        "",
    ]
    for zoo in ZOOS:
        mine = [o for o in outcomes.values() if o["zoo"] == zoo]
        same = sum(o["verdict"] == "same" for o in mine)
        ran = [o for o in mine if o["verdict"] != "left out"]
        lines += [f"## {zoo}", "", f"{same} of {len(ran)} are the same.", ""]
        lines += ["| model | outcome | gradients | largest difference | trace, lower, compile (s) | remark |"]
        lines += ["| --- | --- | ---: | ---: | ---: | --- |"]
        for o in sorted(ran, key=lambda o: o["name"]):
            seconds = ", ".join(f"{s:.1f}" for s in o.get("seconds", {}).values())
            worst = f"{o['worst']:.1e}" if "worst" in o else ""
            why = re.sub(r"/\S*/(site-packages|zoo|src)/", "", o["why"]).replace("|", "\\|")[:200]
            lines.append(f"| {o['name']} | {o['verdict']} | {o.get('parameters', '')} | {worst} | {seconds} | {why} |")
        lines.append("")
    path.write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoos", nargs="*", metavar="ZOO", help=f"of {', '.join(ZOOS)} (default all)")
    parser.add_argument("--only", help="a regular expression: run these again")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a model may take")
    parser.add_argument("--table", action="store_true", help="write the page from outcomes found before")
    options = parser.parse_args()
    prepare()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    OUTCOMES.parent.mkdir(exist_ok=True)
    for zoo in options.zoos or ZOOS:
        if options.table:
            break
        import jax  # noqa: F401  # imported, and no more: its threads would not survive the fork

        import firstloss.runtime.executable  # noqa: F401

        for name in ZOOS[zoo][0]:
            known = (zoo, name) in read_outcomes() if options.only is None else not re.search(options.only, name)
            if known:
                continue
            out = in_child(zoo, name, options.limit)
            with OUTCOMES.open("a") as file:
                file.write(json.dumps(out) + "\n")
            print(f"{zoo:12} {name:30} {out['verdict']:9} {out.get('worst', 0):.1e} {out['why'][:250]}", flush=True)
    write_page(read_outcomes(), ROOT / "docs" / "model-steps.md")


if __name__ == "__main__":
    main()
