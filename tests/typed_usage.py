"""What type checkers and editors know of the public names; checked by mypy (`make lint`), and never run."""

from collections.abc import Callable
from typing import Any, assert_type

import torch
from torch import nn

import firstloss as fl
import firstloss.cstorch as cstorch
from firstloss.init.init_program import InitProgram
from firstloss.program.program import Program
from firstloss.runtime.backend import Backend
from firstloss.runtime.compiled_model import CompiledModel
from firstloss.runtime.step.plan import StepPlan


def deferred_initialization() -> None:
    with fl.deferred():
        model = nn.Linear(4, 3)
    assert_type(fl.materialize_module(model), nn.Linear)
    assert_type(fl.deferred_init(nn.Linear, 4, out_features=3), nn.Linear)
    assert_type(fl.is_deferred(model.weight), bool)
    assert_type(fl.init_program(model), InitProgram)
    fl.misspelt()  # type: ignore[attr-defined]


def training() -> None:
    backend = fl.backend("XLA")
    assert_type(backend, Backend)
    model = fl.compile(nn.Linear(4, 3), backend)
    assert_type(model, CompiledModel)

    @fl.trace
    def step(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        log(x.mean(), "mean")
        return scale * x

    @fl.trace(shapes=fl.Pad(), changes="refuse")
    def another(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x, 1

    @fl.step_closure
    def log(loss: float | torch.Tensor, name: str) -> None:
        print(name, loss)

    x = torch.ones(2, 4)
    assert_type(step(x, scale=2.0), torch.Tensor)
    assert_type(another(x), tuple[torch.Tensor, int])
    assert_type(step.plan(x), StepPlan)
    assert_type(step.program(), Program)
    step("a batch")  # type: ignore[arg-type]
    log(1.0)  # type: ignore[call-arg]


class Training:
    @fl.trace
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def run(self) -> None:
        assert_type(self.step, Callable[..., torch.Tensor])
        assert_type(Training.step.program(), Program)


def cerebras() -> None:
    assert_type(cstorch.compile(nn.Linear(4, 3), cstorch.backend("CPU")), CompiledModel)
    assert_type(cstorch.load("checkpoint"), Any)
    cstorch.misspelt()  # type: ignore[attr-defined]
