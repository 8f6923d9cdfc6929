"""Steps in segments, against the same steps compiled as a whole."""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.lower import segments
from firstloss.lower.program import LoweredCall
from firstloss.lower.repeats import Repeats
from firstloss.program.graph import Value
from firstloss.runtime.step import functions
from firstloss.runtime.step.arguments import Arguments
from tests import compiled_steps

# Both compute the same operations in float32; compiled separately, they are fused differently, and multiply-adds round
# differently. The backward pass of a batch norm subtracts nearly equal sums, which magnifies this by ten.
CLOSE = 2e-6
CLOSE_NORMED = 2e-5


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Deep(nn.Module):
    """Identical blocks, an embedding tied to the head, and weights shared by some blocks."""

    def __init__(self, layers=10, width=16, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[4].up = self.blocks[3].up

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stages(nn.Module):
    """Stages of convolutions with different widths, each of identical blocks with batch norms."""

    def __init__(self):
        super().__init__()
        layers, width = [nn.Conv2d(3, 8, 3, padding=1)], 8
        for wider in (8, 16):
            layers.append(nn.Conv2d(width, wider, 1))
            width = wider
            for _ in range(7):
                layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(16, 32)

    def forward(self, images):
        return self.head(self.body(images).mean((2, 3)))


def plain(model, optimizer, batch):
    loss = F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def clipped(model, optimizer, batch):
    loss = F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "norm": norm, "view": (next(model.parameters())[0] * 2)[1:]}


def accumulating(model, optimizer, batch):
    for part in range(2):
        loss = F.cross_entropy(model(batch[0][part::2]).flatten(0, -2), batch[1][part::2].flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def tokens():
    batch = torch.randint(0, 32, (4, 8))
    return batch, batch.roll(1, 1)


def images():
    return torch.randn(4, 3, 8, 8), torch.randint(0, 32, (4,))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


CASES = {
    "adamw": (Deep, tokens, plain, adamw),
    "sgd": (Deep, tokens, plain, momentum),
    "fused": (Deep, tokens, plain, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)),
    "dropout": (lambda: Deep(dropout=0.3), tokens, plain, adamw),
    "clipped": (Deep, tokens, clipped, adamw),
    "accumulating": (Deep, tokens, accumulating, momentum),
    "stages": (Stages, images, plain, momentum),
}


def train(case, folder, steps=3):
    make, batches, step, optimizer = CASES[case]
    backend = fl.backend("XLA", artifact_dir=folder)
    torch.manual_seed(0)
    with backend.device:
        model = make()
    optim = optimizer(model.parameters())
    compiled = fl.compile(model, backend)
    run = fl.trace(lambda batch: step(compiled, optim, batch))
    generator_state = torch.get_rng_state()
    torch.manual_seed(1)
    results = [run(batches()) for _ in range(steps)]
    torch.set_rng_state(generator_state)
    executable = compiled_steps.latest(run)
    state = {**model.state_dict(), **{f"{n}.{k}": v for n, s in enumerate(optim.state.values()) for k, v in s.items()}}
    return executable, results, state


def close(a, b, bound):
    scale = max(float(b.abs().max()), 1.0) if b.numel() else 1.0
    return float((a.double() - b.double()).abs().max() if b.numel() else 0.0) <= bound * scale


# "accumulating" includes everything that "sgd" computes, and "dropout" what "adamw" does.
IN_SWEEP = ("sgd", "adamw")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.sweep] * (c in IN_SWEEP)) for c in CASES])
def test_segments_match_the_step_compiled_as_a_whole(case, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "_SAVED", 1 << 30)
    whole, results, state = train(case, tmp_path)
    assert len(compiled_steps.segment_calls(whole)) == 1
    monkeypatch.setattr(segments, "_SAVED", 60)
    monkeypatch.setattr(segments, "LEAST_PERIODS_ON_CPU", 2)
    monkeypatch.setattr(segments, "_LEAST_CALLS", 8)
    apart, results_apart, state_apart = train(case, tmp_path)
    assert len(compiled_steps.segment_calls(apart)) > len(compiled_steps.segment_executables(apart)) + 4
    bound = CLOSE_NORMED if case == "stages" else CLOSE
    flat, flat_apart = (torch.utils._pytree.tree_leaves(r) for r in (results, results_apart))
    assert len(flat) == len(flat_apart) >= 3
    assert all(close(a.to("cpu"), b.to("cpu"), bound) for a, b in zip(flat_apart, flat, strict=True))
    assert state.keys() == state_apart.keys()
    assert [k for k in state if not close(state_apart[k].to("cpu"), state[k].to("cpu"), bound)] == []


def test_compiled_functions_do_not_grow_with_the_layers():
    def functions(layers):
        step = Captured(layers)
        segmented = segments.cut(step.program)
        assert segmented is not None
        return {s.function: len(s.calls) for s in segmented.segments}

    few, many = functions(30), functions(60)
    assert sum(many.values()) <= 2 * sum(few.values())


@pytest.mark.parametrize("before, after", [(0, 0), (5, 3), (2, 11)])
def test_segments_are_whole_layers_if_there_is_a_choice(before, after):
    """No part of a layer is left at the ends, to be compiled again with what surrounds the layers."""
    layers, period = 24, 30

    def value():
        return Value((8,), (1,), torch.float32, torch.device("cpu"))

    values = [value() for _ in range(before + layers * period + after + 1)]
    calls = [LoweredCall(None, values[n : n + 1], values[n + 1 : n + 2], None, None) for n in range(len(values) - 1)]
    last_use = {one: n for n, one in enumerate(values)}
    run = Repeats(before, before + layers * period + after, period)
    bounds = segments._bounds(run, calls, last_use)
    assert bounds[-1] - bounds[0] == layers * period and len(bounds) == layers // 2 + 1


class Captured:
    """The Program of a step of `Deep`, without compiling."""

    def __init__(self, layers):
        from firstloss.runtime.step import compiling

        backend = fl.backend("XLA")
        with backend.device:
            model = Deep(layers)
        optimizer = adamw(model.parameters())
        compiled = fl.compile(model, backend)
        compile_step, compiling.compile_step = compiling.compile_step, lambda *args: None
        try:
            run = fl.trace(lambda batch: plain(compiled, optimizer, batch))
            with pytest.raises(AttributeError, match="NoneType"):  # there is nothing to call
                run(tokens())
        finally:
            compiling.compile_step = compile_step
        self.program = run.program()


def test_few_layers_are_one_function_on_a_cpu_device(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "_SAVED", 60)
    assert segments.cut(Captured(10).program, least_periods=2) is not None
    monkeypatch.setattr(segments, "LEAST_PERIODS_ON_CPU", 11)
    executable, _, _ = train("sgd", tmp_path, steps=1)
    assert len(compiled_steps.segment_calls(executable)) == 1


def test_weights_are_updated_in_place(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "_SAVED", 60)
    monkeypatch.setattr(segments, "LEAST_PERIODS_ON_CPU", 2)
    monkeypatch.setattr(segments, "_LEAST_CALLS", 8)
    executable, _, _ = train("adamw", tmp_path, steps=1)
    state = [executable.inputs.array(value, []) for value in executable.traced.owners.changed]
    executable(Arguments(((tokens(),), {}), [*tokens()], None))
    kept = [tuple(array.shape) for array in state if not array.is_deleted()]
    assert kept == []


def test_calls_are_ordered_by_their_dependencies():
    from firstloss.lower.foreach_split import split_foreach_calls

    program = Captured(12).program
    calls = split_foreach_calls(program.nodes)
    available = set(program.inputs.values())
    outputs = {value for call in calls for value in call.outputs}
    for call in calls:
        assert all(value in available for value in call.inputs if value in outputs)
        available.update(call.outputs)
    assert outputs == {value for node in program.nodes for value in node.outputs}


def test_a_backward_pass_without_lowering_is_an_error_at_every_call(tmp_path, monkeypatch):
    from firstloss.runtime.step import functions

    monkeypatch.setattr(segments, "_SAVED", 60)
    monkeypatch.setattr(segments, "LEAST_PERIODS_ON_CPU", 2)
    backend = fl.backend("XLA", artifact_dir=tmp_path, first_loss="compiled")
    with backend.device:
        model = Deep()
    optimizer = adamw(model.parameters())
    compiled = fl.compile(model, backend)
    run = fl.trace(lambda batch: plain(compiled, optimizer, batch), reads="refuse")
    lower = functions.lower_function

    def refuse(name, function, edges):
        if function.reused:  # it updates the state: only operations after the loss do
            raise fl.errors.LoweringError("no rule")
        return lower(name, function, edges)

    monkeypatch.setattr(functions, "lower_function", refuse)
    before = model.embed.weight.detach().to("cpu").clone()
    batch = tokens()
    for _ in range(2):
        with pytest.raises(fl.errors.LoweringError, match="no rule"):
            run(batch)
    assert torch.equal(model.embed.weight.detach().to("cpu"), before)


def test_a_cached_backward_pass_is_lowered_after_the_loss(tmp_path, monkeypatch):
    from firstloss.runtime.step import functions

    monkeypatch.setattr(segments, "_SAVED", 60)
    monkeypatch.setattr(segments, "LEAST_PERIODS_ON_CPU", 2)
    # A step count that is constant: only operations after the loss update state.
    monkeypatch.setattr(Block, "forward", lambda self, x: x + self.down(F.gelu(self.up(self.norm(x)))))
    lower, order = functions.lower_function, []

    def watched(name, function, edges):
        order.append("renewing" if function.reused else "forward")
        if function.reused and refused:
            raise fl.errors.LoweringError("no rule")
        return lower(name, function, edges)

    monkeypatch.setattr(functions, "lower_function", watched)

    def start():
        order.clear()
        torch.manual_seed(0)
        backend = fl.backend("XLA", artifact_dir=tmp_path, first_loss="compiled")
        with backend.device:
            model = Deep()
        optimizer = adamw(model.parameters())
        compiled = fl.compile(model, backend)
        run = fl.trace(lambda batch: plain(compiled, optimizer, batch))
        loss = float(run(tokens()))
        return loss, list(order), run, model

    refused = False
    loss, before, _, model = start()
    assert "renewing" in before
    weight = model.embed.weight.detach().cpu().clone()  # waits for the whole step
    again, _, run, model = start()
    assert again == loss and torch.equal(model.embed.weight.detach().cpu(), weight)
    refused = True  # the cached note is wrong: the error is raised later
    again, _, run, model = start()
    assert again == loss
    with pytest.raises(fl.errors.LoweringError, match="no rule"):
        model.embed.weight.tolist()
    with pytest.raises(fl.errors.LoweringError, match="no rule"):
        run(tokens())
    held = model.embed.weight.detach().cpu().clone()  # the state before the step: nothing has been changed
    refused = False
    run(tokens())
    assert not torch.equal(model.embed.weight.detach().cpu(), held)


@pytest.mark.parametrize("level, noted", [("INFO", 1), ("WARNING", 0)])
def test_a_long_compilation_is_noted(level, noted, tmp_path, monkeypatch, caplog, capsys):
    compile_function = functions.CompiledFunctions._compile

    def slow(self, number, lowered):
        assert waited.wait(60)
        return compile_function(self, number, lowered)

    waited = threading.Event()
    monkeypatch.setattr(functions.CompiledFunctions, "_compile", slow)
    monkeypatch.setattr(functions, "_NOTICE_SECONDS", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    compile_all = functions.CompiledFunctions._awaited

    def awaited(self, future):
        threading.Timer(0.2, waited.set).start()
        return compile_all(self, future)

    monkeypatch.setattr(functions.CompiledFunctions, "_awaited", awaited)
    fl.backend("XLA", artifact_dir=tmp_path, first_loss="compiled")
    caplog.set_level(level, "firstloss")
    step = fl.trace(lambda x: (x * 2).sum())
    assert step(torch.ones(3)).item() == 6
    logged = [record.getMessage() for record in caplog.records if record.getMessage().startswith("compiling ")]
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("compiling ")]
    assert bool(logged) == noted and bool(printed) == (not noted)
    assert all("0 of 1 functions" in line for line in (*logged, *printed))
