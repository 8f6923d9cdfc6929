"""The Trainer with Model Zoo's names, settings and hooks.

Tolerances are for float32 sums in another order: 1e-6 for a single value, 1e-4 after several training steps.
"""

import gc
import json
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.errors import MissingDependencyError, NaNLossError, TrainerError
from firstloss.trainer import Callback, Checkpoint, Logging, MixedPrecision, Trainer, TrainingLoop, ValidationLoop
from firstloss.trainer.callbacks import (
    CheckLoss,
    ComputeNorm,
    CountParams,
    GradientClipping,
    KeepNCheckpoints,
    LogOptimizerParamGroup,
    ModelEMA,
    ModelEvalMetrics,
    NaNChecker,
    Profiler,
)
from firstloss.trainer.loggers import MLflowLogger, WandbLogger

from .small import Net, adamw, loader

BACKENDS = ["XLA", "CPU"]


class Book(Callback):
    """Records logged values by step."""

    def __init__(self):
        self.logged = {}

    def on_metrics(self, trainer, metrics, step):
        self.logged.setdefault(step, {}).update(metrics)


def run(folder, device="CPU", model=lambda: Net(dropout=0.0), optimizer=adamw, **options):
    book = Book()
    options.setdefault("loop", TrainingLoop(num_steps=4))
    trainer = Trainer(
        device=device,
        model_dir=folder,
        model=model,
        optimizer=optimizer,
        logging=Logging(log_steps=1),
        loggers=[book],
        seed=0,
        **options,
    )
    return trainer, book


# -- how long, and when to validate --

LOOPS = {
    "steps": ({"num_steps": 5}, 5, [5]),
    "epochs": ({"num_epochs": 2}, 12, [12]),
    "short epochs": ({"num_epochs": 2, "steps_per_epoch": 4}, 8, [8]),
    "accumulated": ({"num_epochs": 2, "grad_accum_steps": 2}, 6, [6]),
    "often": ({"num_steps": 5, "eval_frequency": 2}, 5, [2, 4, 5]),
    "half": ({"num_steps": 6, "eval_frequency": 0.5}, 6, [3, 6]),
    "at the end": ({"max_steps": 5, "eval_frequency": 1.0}, 5, [5]),
    "never": ({"num_steps": 5, "eval_frequency": 0}, 5, []),
    "the fewer": ({"num_steps": 5, "max_steps": 3}, 3, [3]),
}


@pytest.mark.parametrize("case", LOOPS)
def test_loops_run_their_steps_and_validations(case, tmp_path):
    options, steps, validated = LOOPS[case]
    trainer, book = run(tmp_path, loop=TrainingLoop(**options, eval_steps=2))
    trainer.fit(loader(), loader(count=32))
    assert trainer.global_step == steps
    assert [step for step, metrics in book.logged.items() if "val_loss" in metrics] == validated


def test_steps_count_from_where_fit_begins(tmp_path):
    trainer, book = run(tmp_path, loop=TrainingLoop(num_steps=4, eval_frequency=3))
    trainer.fit(loader(), loader(count=8))
    trainer.fit(loader(), loader(count=8))
    assert trainer.global_step == 8
    assert [step for step, metrics in book.logged.items() if "val_loss" in metrics] == [3, 4, 7, 8]


def test_eval_steps_limits_validation(tmp_path):
    class Counts(Callback):
        batches = 0

        def on_validation_batch_end(self):
            self.batches += 1

    counts = Counts()
    for loop in (TrainingLoop(num_steps=1, eval_steps=2), ValidationLoop(eval_steps=2), ValidationLoop(max_batches=2)):
        counts.batches = 0
        trainer, _ = run(tmp_path, loop=loop, callbacks=[counts])
        trainer.validate(loader(), ckpt_path=None)
        assert counts.batches == 2
    counts.batches = 0
    trainer.validate(loader(), loop=ValidationLoop(eval_steps=3))
    assert counts.batches == 3


WRONG = {
    "both": lambda: TrainingLoop(num_steps=1, num_epochs=1),
    "no epochs": lambda: TrainingLoop(num_steps=1, steps_per_epoch=1),
    "more than all": lambda: TrainingLoop(num_steps=1, eval_frequency=1.5),
    "less than never": lambda: TrainingLoop(num_steps=1, eval_frequency=-1),
    "when, twice": lambda: TrainingLoop(num_steps=1, eval_frequency=1, eval_every_steps=1),
    "how many, twice": lambda: ValidationLoop(max_batches=1, eval_steps=1),
    "how many, in two places": lambda: TrainingLoop(
        num_steps=1, eval_steps=1, validation=ValidationLoop(max_batches=1)
    ),
    "nothing": lambda: TrainingLoop(eval_steps=1),
    "float32 as half": lambda: MixedPrecision(fp16_type="float32"),
    "clipped twice": lambda: MixedPrecision(max_gradient_norm=1.0, max_gradient_value=1.0),
    "clipped to nothing": lambda: MixedPrecision(max_gradient_norm=0.0),
    "limits of a fixed scale": lambda: MixedPrecision(loss_scaling_factor=8.0, max_loss_scale=16.0),
    "no limit": lambda: GradientClipping(),
    "a negative limit": lambda: GradientClipping(max_norm=-1.0),
    "checkpoints": lambda: KeepNCheckpoints(0),
    "decay": lambda: ModelEMA(decay=1.0),
    "steps": lambda: Profiler(start_step=3, end_step=2),
    "NaN steps": lambda: NaNChecker(num_steps=0),
    "level": lambda: Logging(log_level="LOUD"),
    "autoload": lambda: Checkpoint(autoload_last_checkpoint="no"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_arguments_are_refused(case):
    with pytest.raises(TrainerError):
        WRONG[case]()


# -- precision --


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize(
    "options, dtype, logged",
    [
        ({"enabled": False}, torch.float32, None),
        ({}, torch.bfloat16, None),
        ({"fp16_type": "float16", "loss_scaling_factor": "dynamic", "initial_loss_scale": 64.0}, torch.float16, 64.0),
        ({"fp16_type": "float16", "loss_scaling_factor": 8.0, "log_loss_scale": True}, torch.float16, 8.0),
    ],
)
def test_mixed_precision_trains(device, options, dtype, logged, tmp_path):
    seen = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x, y):
            logits = self.layer(x)
            seen.append(logits.dtype)
            return F.cross_entropy(logits.float(), y)

    trainer, book = run(tmp_path, device, Model, precision=MixedPrecision(**options, max_gradient_norm=0.5))
    trainer.fit(loader())
    assert set(seen) == {dtype}
    assert book.logged[1].get("loss_scale") == logged and "grad_norm" in book.logged[1]


# -- hooks --


class Everything(Callback):
    """Model Zoo's hooks, with its arguments."""

    def __init__(self):
        self.seen = []

    def setup(self, trainer):
        self.seen.append("setup")

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        assert isinstance(loop, TrainingLoop) and val_dataloader is None
        self.seen.append("fit_start")

    def on_fit_end(self, trainer, loop):
        self.seen.append("fit_end")

    def on_train_start(self, trainer, model, train_dataloader, loop):
        assert model.training
        self.seen.append("train_start")

    def on_train_end(self, trainer, model, loop):
        self.seen.append("train_end")

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.seen.append(f"batch {batch_idx}")

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        assert "loss" in outputs

    def on_before_forward(self, trainer, model, batch, args, kwargs):
        kwargs["scale"] = 2.0

    def on_after_forward(self, trainer, model, outputs, batch):
        trainer.log_metrics(rows=torch.ones(len(batch[0])).sum(), one=1)

    def on_before_backward(self, trainer, model, outputs):
        trainer.log_metrics(largest=outputs["logits"].detach().abs().max())

    def on_after_backward(self, trainer, model, outputs):
        trainer.log_metrics(gradient=next(model.parameters()).grad.norm())

    def on_before_optimizer_step(self, trainer, model, optimizer):
        for p in model.parameters():
            p.grad.mul_(0.5)

    def on_after_optimizer_step(self, trainer, model, optimizer):
        with torch.no_grad():
            trainer.log_metrics(weight=next(model.parameters()).detach().norm())

    def on_before_optimizer_zero_grad(self, trainer, model, optimizer):
        trainer.log_metrics(halved=next(model.parameters()).grad.norm())

    def on_after_optimizer_zero_grad(self, trainer, model, optimizer):
        assert all(p.grad is None for p in model.parameters())

    def on_before_scheduler_step(self, trainer, model, optimizer, scheduler):
        self.seen.append("scheduler")

    def on_after_scheduler_step(self, trainer, model, optimizer, scheduler):
        pass


class Scaled(Net):
    def forward(self, x, y, scale=1.0):
        output = super().forward(x, y)
        return {**output, "loss": output["loss"] * scale}


def test_hooks_run_in_the_step(tmp_path):
    """The same numbers traced and eager; changes that hooks make to gradients and arguments take effect."""
    books = []
    for device in BACKENDS:
        everything = Everything()
        trainer, book = run(
            tmp_path / device,
            device,
            lambda: Scaled(dropout=0.0),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            schedulers=lambda o: fl.optim.lr_scheduler.LinearLR(o, 0.1, 0.0, 8),
            callbacks=[everything],
        )
        trainer.fit(loader())
        assert everything.seen[:3] == ["setup", "fit_start", "train_start"]
        assert everything.seen[-2:] == ["train_end", "fit_end"]
        assert [line for line in everything.seen if "batch" in line] == [f"batch {i}" for i in range(4)]
        assert everything.seen.count("scheduler") >= 1
        books.append(book.logged)
    assert list(books[0]) == list(books[1]) == [1, 2, 3, 4]
    for step, expected in books[1].items():
        actual = books[0][step]
        names = ["rows", "one", "largest", "gradient", "weight", "halved", "loss"]
        assert [actual[n] for n in names] == pytest.approx([expected[n] for n in names], rel=3e-6)  # float32: 3e-7
        assert expected["halved"] == expected["gradient"] / 2
        assert expected["rows"] == 8


def test_log_metrics_takes_numbers(tmp_path):
    trainer, book = run(tmp_path)
    trainer.log_metrics(a=torch.tensor(2.0), b=3)
    assert book.logged == {0: {"a": 2.0, "b": 3.0}}
    with pytest.raises(TrainerError, match=r"\[2\]"):
        trainer.log_metrics(a=torch.ones(2))


# -- callbacks --


@pytest.mark.parametrize("device", BACKENDS)
def test_norms_and_optimizer_settings_are_logged(device, tmp_path):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.head = nn.Linear(8, 4)

        def forward(self, x, y):
            for layer in self.layers:
                x = layer(x).relu()
            return F.cross_entropy(self.head(x), y)

    keys = LogOptimizerParamGroup(["weight_decay", "betas"])
    trainer, book = run(
        tmp_path,
        device,
        Layers,
        loop=TrainingLoop(num_steps=1),
        callbacks=[ComputeNorm(), keys, CountParams(), GradientClipping(max_norm=0.1)],
    )
    trainer.fit(loader(shuffle=False))
    torch.manual_seed(0)
    model = Layers()
    logged = book.logged[1]
    # float32 norms, here and below. Measured: 9e-8.
    assert logged["model_wise_params_norm"] == pytest.approx(
        math.sqrt(sum(float(p.detach().square().sum()) for p in model.parameters())), rel=1e-6
    )
    x, y = next(iter(loader(shuffle=False)))
    model(x, y).backward()
    square = {name: float(p.grad.square().sum()) for name, p in model.named_parameters()}
    assert (
        logged["model_wise_grad_norm"]
        == logged["grad_norm"]
        == pytest.approx(math.sqrt(sum(square.values())), rel=1e-6)
    )
    for layer in range(2):
        expected = math.sqrt(square[f"layers.{layer}.weight"] + square[f"layers.{layer}.bias"])
        assert logged[f"per_layer_grad_norm/layer_{layer}"] == pytest.approx(expected, rel=1e-6)
    assert (logged["weight_decay"], logged["betas[0]"], logged["betas[1]"]) == (0.01, 0.9, 0.999)
    counted = json.loads((tmp_path / "artifacts" / "parameters.json").read_text())
    assert counted == {"all": 180, "trained": 180, "modules": {"layers": 144, "head": 36}}


def test_unknown_settings_are_refused(tmp_path):
    trainer, _ = run(tmp_path, callbacks=[LogOptimizerParamGroup("momentum")])
    with pytest.raises(TrainerError, match="no group has 'momentum'"):
        trainer.fit(loader())


@pytest.mark.parametrize("options", [{"max_norm": 0.01}, {"max_value": 0.001}])
@pytest.mark.parametrize("device", BACKENDS)
def test_clipping_callbacks_match_the_loops(options, device, tmp_path):
    """Like the loop's own clipping."""
    weights = []
    for way in ("callback", "loop"):
        expected = {f"clip_grad_{name.removeprefix('max_')}": value for name, value in options.items()}
        trainer, _ = run(
            tmp_path / way,
            device,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
            loop=TrainingLoop(num_steps=3, **(expected if way == "loop" else {})),
            callbacks=[GradientClipping(**options)] if way == "callback" else [],
        )
        trainer.fit(loader())
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_old_checkpoints_are_deleted(tmp_path):
    trainer, _ = run(
        tmp_path, callbacks=[KeepNCheckpoints(2)], checkpoint=Checkpoint(steps=1, save_initial_checkpoint=True)
    )
    trainer.fit(loader())
    assert trainer.folder.steps() == [3, 4]


def test_the_initial_checkpoint_is_saved(tmp_path):
    checkpoint = Checkpoint(save_initial_checkpoint=True, autoload_last_checkpoint=False)
    assert not checkpoint.autoload_last and not Checkpoint(disable_strict_checkpoint_loading=True).strict
    trainer, _ = run(tmp_path, checkpoint=checkpoint)
    trainer.fit(loader())
    assert trainer.folder.steps() == [0, 4]
    again, _ = run(tmp_path, checkpoint=checkpoint)
    again.fit(loader())
    assert again.global_step == 4  # from the beginning


class Fails(nn.Module):
    """Its second layer divides by zero from the third batch on."""

    def __init__(self, where="output"):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.where = where

    def forward(self, x, y):
        self.steps += 1
        bad = torch.where(self.steps >= 3, float("nan"), 1.0)
        x = self.first(x)
        if self.where == "output":
            x = x * bad
        x = self.second(x)
        if self.where == "gradient":
            x = Bad.apply(x, bad)
        return F.cross_entropy(self.third(x), y)


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bad):
        ctx.save_for_backward(bad)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("where, what", [("output", "output of 'second'"), ("gradient", "gradient of 'second.bias'")])
def test_nan_is_traced_to_its_layer(where, what, device, tmp_path):
    trainer, _ = run(tmp_path, device, lambda: Fails(where), loop=TrainingLoop(num_steps=6), callbacks=[NaNChecker()])
    with pytest.raises(NaNLossError, match=f"the {what} is not finite at step 3") as raised:
        trainer.fit(loader())
    assert raised.value.step == 3
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_nan_checker_ends_the_run(tmp_path):
    trainer, _ = run(tmp_path, loop=TrainingLoop(max_steps=6), callbacks=[NaNChecker(num_steps=2)])
    trainer.fit(loader())
    assert trainer.global_step < 6 and "NaNChecker" in trainer.state.stopped


def test_validation_losses_are_checked(tmp_path):
    class Model(Net):
        def forward(self, x, y):
            output = super().forward(x, y)
            return output if self.training else {**output, "loss": output["loss"] * float("inf")}

    trainer, _ = run(tmp_path, model=Model, callbacks=[CheckLoss()])
    with pytest.raises(NaNLossError, match="val_loss is inf in the validation after step 4"):
        trainer.fit(loader(), loader())


@pytest.mark.parametrize("device", BACKENDS)
def test_averaged_weights_match_pytorchs(device, tmp_path):
    """The same as PyTorch's own, and validation uses them; a checkpoint has both, to resume and to validate."""
    history = []

    class Keep(Callback):
        def on_step_end(self, trainer):
            history.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})

        def on_fit_start(self, trainer):
            if not trainer.global_step:
                history.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})

    ema = ModelEMA(decay=0.5)
    options = {"callbacks": [ema, Keep()], "checkpoint": Checkpoint(steps=2)}
    trainer, book = run(tmp_path, device, loop=TrainingLoop(max_steps=4), **options)
    trainer.fit(loader(), loader(count=16))
    assert ema.averages.keys() == history[0].keys()
    for name, average in ema.averages.items():
        expected = history[0][name]
        for weights in history[1:]:
            expected = torch.lerp(expected, weights[name], 0.5)
        torch.testing.assert_close(average.clone(), expected, rtol=1e-6, atol=1e-7)  # float32, three interpolations
        assert torch.equal(dict(trainer.model.named_parameters())[name].detach(), history[-1][name])
    model = Net(dropout=0.0)
    model.load_state_dict({**trainer.model.state_dict(), **{n: a.clone() for n, a in ema.averages.items()}})
    model.eval()
    with torch.no_grad():
        expected = sum(float(model(x, y)["loss"]) for x, y in loader(count=16, shuffle=False)) / 2
    # float32 means, in another order, here and below. Measured: 1e-7.
    assert book.logged[4]["val_loss"] == pytest.approx(expected, rel=1e-6)
    # Another process: validate, and resume.
    other, _ = run(tmp_path, device, callbacks=[ModelEMA(decay=0.5)])
    output = other.validate(loader(count=16))
    assert output["val_loss"] == pytest.approx(expected, rel=1e-6)
    again_ema = ModelEMA(decay=0.5)
    again, _ = run(tmp_path, device, loop=TrainingLoop(max_steps=5), callbacks=[again_ema])
    again.fit(loader())
    assert again.global_step == 5 and not torch.equal(
        again_ema.averages["layers.0.weight"].clone(), ema.averages["layers.0.weight"].clone()
    )


@pytest.mark.parametrize("device", BACKENDS)
def test_a_profile_is_written(device, tmp_path):
    trainer, _ = run(tmp_path, device, callbacks=[Profiler(2, 3)])
    trainer.fit(loader())
    written = json.loads((tmp_path / "artifacts" / "profile_2_3.json").read_text())
    events = written["traceEvents"] if isinstance(written, dict) else written
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert names == {f"{what} {step}" for what in ("read batch for step", "start step", "step") for step in (2, 3)}
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert {"data", "host", "device"} <= tracks


@pytest.mark.parametrize("device", BACKENDS)
def test_metrics_of_the_model_are_reported(device, tmp_path):
    class Model(Net):
        def __init__(self):
            super().__init__(dropout=0.0)
            self.metric = fl.metrics.AccuracyMetric("token_accuracy")

        def forward(self, x, y):
            output = super().forward(x, y)
            if not self.training:
                self.metric(labels=y, predictions=output["logits"].argmax(-1))
            return output

    trainer, book = run(tmp_path, device, Model, callbacks=[ModelEvalMetrics()], loop=TrainingLoop(num_steps=4))
    trainer.fit(loader(), loader(count=24))
    for _ in range(2):
        output = trainer.validate(loader(count=24))
        # a quotient, and a mean of quotients, in float32
        assert output["val_token_accuracy"] == pytest.approx(output["val_accuracy"], rel=1e-6)


# -- several loaders, several checkpoints --


def test_several_loaders_are_validated(tmp_path):
    trainer, book = run(tmp_path)
    trainer.fit(loader(), [loader(count=16), loader(count=8)])
    assert {"val_loss_0", "val_loss_1"} <= book.logged[4].keys()
    one = trainer.validate(loader(count=8))
    assert one["val_loss"] == pytest.approx(book.logged[4]["val_loss_1"], rel=1e-6)  # shuffled: another order of sums


@pytest.mark.parametrize("device", BACKENDS)
def test_several_checkpoints_are_validated(device, tmp_path):
    trainer, _ = run(tmp_path, device, checkpoint=Checkpoint(steps=1, keep_last=None))
    trainer.fit(loader())
    folder = tmp_path / "checkpoints"
    paths = [str(folder / f"step_{n}") for n in (1, 2, 3, 4)]
    loaders = [loader(count=16), loader(count=8)]
    output = trainer.validate_all(loaders, str(folder / "step_*"))
    assert list(output) == paths and all({"val_loss_0", "val_loss_1"} <= f.keys() for f in output.values())
    for path in paths:
        alone, _ = run(tmp_path, device)
        loss = alone.validate(loader(count=16), path)["val_loss"]
        assert loss == pytest.approx(output[path]["val_loss_0"], rel=1e-6)  # shuffled: another order of sums
    assert list(trainer.validate_all(loader(count=8), [paths[0], paths[2]])) == [paths[0], paths[2]]
    assert trainer.validate_all(loader(count=8)) == {None: trainer.validate(loader(count=8))}
    with pytest.raises(TrainerError, match="no checkpoint matches"):
        trainer.validate_all(loaders, str(folder / "stage_*"))


# -- only compiling --


@pytest.mark.own_compile_cache
def test_a_run_can_only_compile(tmp_path):
    backend = fl.backend("CSX", artifact_dir=tmp_path / "artifacts", compile_only=True)
    trainer = Trainer(
        backend=backend,
        model_dir=tmp_path,
        model=Net,
        optimizer=adamw,
        loop=TrainingLoop(num_steps=100, eval_frequency=10),
        checkpoint=Checkpoint(steps=1),
        loggers=[],
    )
    trainer.fit(loader(), loader())
    assert not trainer.folder.steps() and any((tmp_path / "artifacts" / "compiled").iterdir())
    assert trainer.validate(loader(), ckpt_path=None) == {}


# -- loggers of others --


@pytest.fixture
def services(monkeypatch):
    """Fakes of wandb and mlflow, which are not installed; records the calls."""
    calls = []

    def note(name, result=None):
        return lambda *args, **kwargs: calls.append((name, args, kwargs)) or result

    wandb_run = types.SimpleNamespace(id="abc", log=note("log"), finish=note("finish"))
    wandb = types.SimpleNamespace(init=note("init", wandb_run))
    mlflow_run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))
    names = ("set_tracking_uri", "set_experiment", "log_params", "log_metrics", "end_run")
    mlflow = types.SimpleNamespace(start_run=note("start_run", mlflow_run), **{name: note(name) for name in names})
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return calls


def test_weights_and_biases_gets_the_metrics(services, tmp_path):
    def go(steps):
        logger = WandbLogger(project="mine", run_name="one", tags=["a"])
        Trainer(
            device="CPU",
            model_dir=tmp_path,
            model=Net,
            optimizer=adamw,
            loop=TrainingLoop(max_steps=steps),
            loggers=[logger],
        ).fit(loader())

    go(2)
    go(3)
    started = [kwargs for name, _, kwargs in services if name == "init"]
    assert [s["id"] for s in started] == [None, "abc"]  # the second continues with the first one's
    assert started[0]["project"] == "mine" and started[0]["tags"] == ["a"] and started[0]["config"]["seed"] is None
    logged = {kwargs["step"] for name, _, kwargs in services if name == "log"}
    assert 1 in logged
    assert [kwargs for name, _, kwargs in services if name == "finish"] == [{"exit_code": 0}] * 2


def test_mlflow_gets_the_metrics(services, tmp_path):
    def go(steps):
        logger = MLflowLogger(experiment="mine", run_name="one", tracking_uri="file:here")
        Trainer(
            device="CPU",
            model_dir=tmp_path,
            model=Net,
            optimizer=adamw,
            loop=TrainingLoop(max_steps=steps),
            loggers=[logger],
        ).fit(loader())

    go(2)
    go(3)
    started = [kwargs for name, _, kwargs in services if name == "start_run"]
    assert started == [{"run_id": None, "run_name": "one"}, {"run_id": "abc", "run_name": None}]
    assert [args for name, args, _ in services if name == "end_run"] == [("FINISHED",)] * 2
    assert any("loss" in args[0] for name, args, _ in services if name == "log_metrics")


@pytest.mark.parametrize("name, logger", [("wandb", WandbLogger), ("mlflow", MLflowLogger)])
def test_a_missing_logger_package_is_an_error(name, logger, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=f"pip install {name}"):
        logger()


# -- hooks --


class Hooks(Callback):
    """Records the calls of Model Zoo's hooks; validates by itself; scales weights in checkpoints."""

    def __init__(self, loader=None, scale=1.0):
        self.calls, self.loader, self.scale = [], loader, scale

    def pre_setup(self, trainer):
        self.calls.append("pre_setup")

    def setup(self, trainer):
        self.calls.append("setup")

    def post_setup(self, trainer):
        self.calls.append("post_setup")

    def finalize(self):
        self.calls.append("finalize")

    def run_validation(self, trainer, loop_idx, is_last):
        metrics = trainer.validate(self.loader, ckpt_path=None) if self.loader is not None else {}
        self.calls.append((trainer.global_step, loop_idx, is_last, "val_loss" in metrics))

    def preprocess_checkpoint(self, trainer, state):
        weights = state.get("model", state)
        for name in weights:
            weights[name] = weights[name] * self.scale

    def postprocess_checkpoint(self, trainer, state):
        state["model"] = {name: weight / self.scale for name, weight in state["model"].items()}


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("own_loader", [False, True])
def test_hooks_of_model_zoo_are_called(device, own_loader, tmp_path):
    hooks, second = Hooks(loader(count=8) if own_loader else None), Hooks()
    trainer, _ = run(tmp_path, device, loop=TrainingLoop(num_steps=4, eval_frequency=2), callbacks=[hooks, second])
    assert hooks.calls == second.calls == ["pre_setup", "setup", "post_setup"]
    trainer.fit(loader())
    assert hooks.calls[3:] == [(2, 0, False, own_loader), (4, 1, True, own_loader)]
    trainer.fit(loader(), loader(count=8))  # also after the Trainer's own validation; counted from 0 again
    assert second.calls[5:] == [(6, 0, False, False), (8, 1, True, False)]
    del trainer
    gc.collect()
    assert hooks.calls[-1] == second.calls[-1] == "finalize"


@pytest.mark.parametrize("device", BACKENDS)
def test_checkpoints_are_changed_by_hooks_when_saved_and_loaded(device, tmp_path):
    trainer, _ = run(tmp_path / "a", device, callbacks=[Hooks(scale=2.0)])
    trainer.fit(loader())
    saved = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    path = trainer.folder.last()
    halves = fl.load(path)["model"]
    assert all(torch.equal(halves[name], weight / 2) for name, weight in saved.items())
    again, _ = run(tmp_path / "a", device, callbacks=[Hooks(scale=2.0)], loop=TrainingLoop(max_steps=4))
    again.fit(loader())  # resumed at its end
    other, _ = run(tmp_path / "b", device, callbacks=[Hooks(scale=2.0)])
    other.load_checkpoint(path)
    plain, _ = run(tmp_path / "c", device)
    plain.load_checkpoint(path)
    for name, weight in saved.items():
        assert torch.equal(again.model.state_dict()[name], weight)
        assert torch.equal(other.model.state_dict()[name], weight)
        assert torch.equal(plain.model.state_dict()[name], weight / 2)
