"""Training: the same numbers as a hand-written loop, with callables or objects; steps, epochs, validation."""

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.trainer import Callback, Checkpoint, EarlyStop, Precision, Trainer, TrainingLoop, ValidationLoop

from .small import Net, adamw, bits, dataset, decay, loader, trainer

# XLA sums in another order than PyTorch. Measured: 6e-8 absolutely, and 2e-7 of a loss.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Losses(Callback):
    """Records the values of every step."""

    def __init__(self):
        self.found = []

    def on_metrics(self, trainer, metrics, step):
        if "loss" in metrics:
            self.found.append(metrics["loss"])


def sgd(model):
    """SGD, since Adam would turn rounding noise in the gradient of a bias before a batch norm into a large update."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_hand(steps, batches, clip=None, accumulate=1, clip_value=None, dtype=None):
    """The loop written by hand in eager PyTorch; returns the model and the last batch's loss."""
    torch.manual_seed(0)
    model = Net(dropout=0)
    optimizer = sgd(model)
    scheduler = decay(optimizer)
    for step in range(steps):
        for batch in batches[step * accumulate : (step + 1) * accumulate]:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = model(*batch)["loss"]
            (loss / accumulate).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if clip_value:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, loss.item()


def torch_plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    "options", [{}, {"clip_grad_norm": 0.5}, {"clip_grad_value": 0.01}, {"grad_accum_steps": 3, "clip_grad_norm": 0.5}]
)
def test_losses_match_a_hand_written_loop(options, backend, tmp_path):
    batches = [list(batch) for batch in loader(count=96, shuffle=False)]
    losses = Losses()
    accumulate = options.get("grad_accum_steps", 1)
    run = trainer(
        tmp_path, backend, model=lambda: Net(dropout=0), optimizer=sgd, callbacks=[losses], max_steps=4, **options
    )
    run.logging.log_steps = 1
    run.fit(batches)
    model, loss = by_hand(4, batches, options.get("clip_grad_norm"), accumulate, options.get("clip_grad_value"))
    assert len(losses.found) == 4 and losses.found[-1] == pytest.approx(loss, rel=2e-6)  # as CLOSE
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name].clone(), tensor, **CLOSE, msg=name)


@pytest.mark.parametrize("clip", [{"clip_grad_norm": 0.5}, {"clip_grad_value": 0.01}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_are_clipped_in_mixed_precision(dtype, clip, backend, tmp_path):
    """After unscaling, here by a power of two, so that the scale has no effect."""
    batches = [list(batch) for batch in loader(count=64, shuffle=False)]
    mixed = {
        "precision": Precision(dtype, loss_scale=256.0 if dtype == "float16" else None),
        "grad_accum_steps": 2,
        "max_steps": 4,
        **clip,
    }
    run = trainer(tmp_path, backend, model=lambda: Net(dropout=0), optimizer=sgd, **mixed)
    run.fit(batches)
    model, _ = by_hand(4, batches, clip.get("clip_grad_norm"), 2, clip.get("clip_grad_value"), getattr(torch, dtype))
    for name, tensor in model.state_dict().items():
        # Half precision: products round to 8 or 11 bits, and batch norm divides by the remaining deviation.
        torch.testing.assert_close(run.model.state_dict()[name].clone(), tensor, rtol=2e-2, atol=2e-3, msg=name)


def test_objects_and_callables_give_the_same_training(backend, tmp_path):
    runs = []
    for name in ("callables", "objects", "mixed"):
        fresh = fl.backend(backend.name, artifact_dir=backend.artifact_dir)  # its dropout starts over
        torch.manual_seed(0)
        model = Net() if name != "callables" else Net
        optimizer = adamw(model) if name == "objects" else adamw
        schedulers = [decay(optimizer)] if name == "objects" else decay
        # Seeded after an object was created, as with a callable, so that the model draws the same numbers.
        run = trainer(tmp_path / name, fresh, model=model, optimizer=optimizer, schedulers=schedulers, seed=None)
        run.fit(loader(shuffle=False))
        runs.append(bits(run))
    assert runs[0] == runs[1] == runs[2]


def test_epochs_are_counted_by_the_loader(backend, tmp_path):
    run = trainer(tmp_path, backend, loop=TrainingLoop(max_epochs=2))
    run.fit(loader(count=24))
    assert (run.state.step, run.state.epoch, run.state.samples) == (6, 2, 48)


def test_batches_of_an_incomplete_step_are_dropped(backend, tmp_path):
    run = trainer(tmp_path, backend, loop=TrainingLoop(max_epochs=1, grad_accum_steps=2))
    run.fit(loader(count=40))
    assert run.state.step == 2
    with pytest.raises(fl.errors.TrainerError, match="fewer than grad_accum_steps=9 batches"):
        trainer(tmp_path / "b", backend, grad_accum_steps=9).fit(loader())


def test_validation_runs_on_schedule_without_side_effects(backend, tmp_path):
    class Count(Callback):
        steps: list = []

        def on_validation_end(self, trainer, metrics):
            self.steps.append(trainer.state.step)

    other = fl.backend(backend.name, artifact_dir=backend.artifact_dir)
    with_validation = trainer(tmp_path / "a", other, max_steps=7, eval_every_steps=3, callbacks=[Count()])
    with_validation.fit(loader(), loader(count=20))
    without = trainer(tmp_path / "b", backend, max_steps=7)
    without.fit(loader())
    assert Count.steps == [3, 6, 7]
    assert bits(with_validation) == bits(without)
    assert with_validation.model.training


def test_validation_averages_over_samples(tmp_path):
    run = trainer(tmp_path, loop=ValidationLoop())
    metrics = run.validate(loader(count=20, batch_size=8, shuffle=False), ckpt_path=None)
    torch.manual_seed(0)
    model = Net().eval()
    expected = model(*dataset(20).tensors)
    # a mean of three batches' means, in float32. Measured: 3e-8.
    assert metrics["val_loss"] == pytest.approx(expected["loss"].item(), rel=1e-6)
    assert metrics["val_accuracy"] == pytest.approx(expected["accuracy"].item(), rel=1e-6)  # as above


def test_metric_objects_are_updated(backend, tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)
    run = trainer(tmp_path, backend, loop=ValidationLoop(metrics={"exact": accuracy}))
    metrics = run.validate(loader(count=20), ckpt_path=None)
    assert metrics["val_exact"] == pytest.approx(
        metrics["val_accuracy"], rel=1e-6
    )  # a quotient, and a mean of quotients


def test_early_stop_ends_the_run(backend, tmp_path):
    run = trainer(tmp_path, backend, eval_every_steps=1, max_steps=50, callbacks=[EarlyStop(patience=2, min_delta=9.0)])
    run.fit(loader(), loader(count=8))
    assert run.state.step == 3 and "val_loss has not improved in 2 validations" in run.state.stopped


def test_a_loss_that_is_nan_names_step_batch_and_checkpoint(backend, tmp_path):
    batches = [list(batch) for batch in loader(shuffle=False)]
    batches[4] = [batches[4][0].clone().fill_(float("nan")), batches[4][1]]
    run = trainer(tmp_path, backend, max_steps=20)
    run.checkpoint.steps = 2
    with pytest.raises(fl.errors.NaNLossError) as caught:
        run.fit(batches)
    assert "the loss is nan at step 5, batch 5 of epoch 1 ((float32[8, 8], int64[8]); 64 of its values" in str(
        caught.value
    )
    assert f"last good checkpoint is {tmp_path / 'checkpoints' / 'step_4'}" in str(caught.value)
    assert caught.value.step == 5 and torch.equal(caught.value.batch[1].clone(), batches[4][1])
    assert run.folder.steps() == [2, 4]


def test_nan_weights_are_not_saved(tmp_path):
    run = trainer(
        tmp_path, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=float("nan")), schedulers=None, max_steps=1
    )
    with pytest.raises(fl.errors.NaNLossError, match=r"layers.0.weight holds NaN after step 1"):
        run.fit(loader())
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_fit_can_be_called_again(backend, tmp_path):
    run = trainer(tmp_path, backend, max_steps=2)
    run.fit(loader())
    run.validate(loader(count=8))
    run.loop.max_steps = 4
    run.fit(loader())
    assert run.state.step == 4 and run.folder.steps() == [2, 4]


def test_two_trainers_can_alternate(tmp_path):
    first, second = (trainer(tmp_path / name, fl.backend("XLA", artifact_dir=tmp_path), max_steps=2) for name in "ab")
    for run in (first, second):
        run.fit(loader())
    first.loop.max_steps = 3
    first.fit(loader())
    assert (first.state.step, second.state.step) == (3, 2) and first.backend is not second.backend


class OneArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, batch):
        x = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, (tuple, list)) else batch
        return self.layer(x).mean()


@pytest.mark.parametrize("batch", [{"x": torch.ones(2, 8)}, [torch.ones(2, 8), torch.ones(2)], torch.ones(2, 8)])
def test_a_forward_with_one_argument_gets_the_whole_batch(batch, backend, tmp_path):
    trainer(tmp_path, backend, model=OneArgument, max_steps=1).fit([batch])


class LossLast(OneArgument):
    """Returns the loss last, as nanoGPT does."""

    def forward(self, x):
        logits = self.layer(x)
        return logits, logits.square().mean()


def test_the_loss_can_be_any_scalar(backend, tmp_path):
    run = trainer(tmp_path, backend, model=LossLast, max_steps=1)
    run.fit([torch.ones(2, 8)])
    assert run.state.step == 1


def test_a_batch_that_does_not_fit_forward_is_refused(tmp_path):
    with pytest.raises(fl.errors.TrainerError, match=r"forward\(x, y\) does not accept .* \{pixels: float32\[2, 8\]\}"):
        trainer(tmp_path).fit([{"pixels": torch.ones(2, 8)}])


def test_a_model_without_a_loss_is_refused(tmp_path):
    with pytest.raises(fl.errors.TrainerError, match=r"Linear.forward returned float32\[2, 3\], which holds no loss"):
        trainer(tmp_path, model=lambda: nn.Linear(8, 3)).fit([torch.ones(2, 8)])


@pytest.mark.parametrize(
    "options, says",
    [
        ({"model": None}, "model is None"),
        ({"model": Net(), "optimizer": lambda m: m}, "instead of an Optimizer"),
        ({"model": lambda: 3}, "instead of an nn.Module"),
        ({"optimizer": torch.optim.AdamW}, "optimizer=lambda model: AdamW"),
        ({"optimizer": 3}, "optimizer is an object of type int"),
        ({"optimizer": adamw(Net())}, "parameters do not exist yet"),
        ({"model": Net(), "optimizer": adamw(Net())}, "are not the model's"),
        ({"optimizer": lambda m: adamw(Net())}, "are not the model's"),
        ({"schedulers": [decay(adamw(Net()))]}, "it does not exist yet, but the StepLR is an object"),
        ({"schedulers": torch.optim.lr_scheduler.StepLR}, "schedulers is the class StepLR"),
        ({"schedulers": lambda o: 3}, "has no step()"),
        ({"optimizer": None}, "without an optimizer"),
        ({"optimizer": None, "schedulers": None}, "fit needs an optimizer"),
        ({"loop": ValidationLoop()}, "fit needs loop=TrainingLoop"),
        ({"device": "CPU"}, "device and backend are two names"),
        ({"model": nn.Linear}, "is called with no argument: missing a required argument: 'in_features'"),
        ({"optimizer": lambda: 3}, "is called with the model: too many positional arguments"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=1.0)}, "called with the model, not with its parameters"),
        ({"schedulers": lambda: 3}, "is called with the optimizer: too many positional arguments"),
        ({"schedulers": torch.optim.lr_scheduler.ReduceLROnPlateau}, "schedulers is the class ReduceLROnPlateau"),
        ({"schedulers": torch_plateau}, "steps on a validation metric"),
        ({"loop": 5}, "loop is an object of type int. Write loop=TrainingLoop(max_steps=1000)."),
        ({"loop": TrainingLoop}, "loop is the class TrainingLoop."),
        ({"checkpoint": 100}, "checkpoint is an object of type int. Write checkpoint=Checkpoint(steps=100)."),
        ({"logging": 10}, "logging is an object of type int."),
        ({"precision": 16}, "precision is an object of type int."),
        ({"precision": "bf16"}, "dtype='bf16' is not one of float32, bfloat16"),
        ({"callbacks": EarlyStop()}, "callbacks is an object of type EarlyStop. Pass a list of them"),
        ({"callbacks": [EarlyStop]}, "take instances, not classes. Write EarlyStop()."),
        ({"callbacks": [EarlyStop()]}, "EarlyStop waits for 'val_loss' of validations, but fit was given no"),
        ({"eval_every_steps": 2}, "no val_dataloader, which eval_every_steps=2 needs"),
        ({"checkpoint": Checkpoint(best="val_loss")}, "which Checkpoint(best='val_loss') needs"),
        ({"callbacks": [print]}, "must be instances of firstloss.trainer.Callback"),
    ],
)
def test_invalid_mixes_of_objects_and_callables_are_refused(options, says, tmp_path):
    with pytest.raises(fl.errors.TrainerError, match="(?s)" + says.replace("(", r"\(").replace(")", r"\)")):
        trainer(tmp_path, **options).fit(loader())
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    "loaders, says",
    [
        ([Net(), []], "train_dataloader is a model (Net). It goes to the Trainer"),
        ([dataset()], "train_dataloader is a dataset (TensorDataset), which yields single samples"),
        ([iter([])], "train_dataloader is an iterator (list_iterator), which can be iterated only once"),
        ([None], "train_dataloader is of type NoneType. Pass a DataLoader or a list of batches."),
        ([[], iter([])], "val_dataloader is an iterator"),
        ([[]], "the training loader yielded no batches in an epoch"),
    ],
)
def test_an_object_that_is_not_a_loader_is_refused(loaders, says, tmp_path):
    with pytest.raises(fl.errors.TrainerError, match=says.replace("(", r"\(").replace(")", r"\)")):
        trainer(tmp_path).fit(*loaders)


def test_an_object_that_is_not_a_metric_is_refused():
    for metric in (3, torch.nn.Linear):
        with pytest.raises(fl.errors.TrainerError, match="Pass an object with update, compute and reset"):
            ValidationLoop(metrics={"mine": metric})


def test_validation_without_weights_is_an_error(tmp_path):
    with pytest.raises(fl.errors.TrainerError, match="no weights to validate: .* has no checkpoint"):
        trainer(tmp_path).validate(loader())
    metrics = trainer(tmp_path, model=Net()).validate(loader())  # an object has weights
    assert metrics["val_loss"] > 0


def test_reduce_on_plateau_works_as_a_callback(backend, tmp_path):
    """As the error suggests; the rate changes without a compile."""

    class Plateau(Callback):
        rates: list = []

        def on_fit_start(self, trainer):
            self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer, patience=0, threshold=99.0)

        def on_validation_end(self, trainer, metrics):
            self.scheduler.step(metrics["val_loss"])
            self.rates.append(trainer.optimizer.param_groups[0]["lr"])

    options = {"callbacks": [Plateau()], "eval_every_steps": 1, "schedulers": None, "max_steps": 3}
    trainer(tmp_path, backend, **options).fit(loader(), loader(count=8))
    assert Plateau.rates == pytest.approx([1e-3, 1e-4, 1e-5])  # split at each, the first one included


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_model_without_labels_gets_a_hint(as_dict, backend, tmp_path):
    batches = [{"x": x, "y": y} if as_dict else [x, y] for x, y in loader()]
    with pytest.raises(
        fl.errors.TrainerError, match="called with the whole batch, and failed: .*def forward.self, x, y"
    ):
        trainer(tmp_path, backend, model=Logits).fit(batches)


def test_a_short_last_validation_batch_does_not_warn(tmp_path, recwarn):
    run = trainer(tmp_path, fl.backend("XLA", artifact_dir=tmp_path / "artifacts"), max_steps=1)
    run.fit(loader(), loader(count=20, shuffle=False))
    assert [str(w.message) for w in recwarn if isinstance(w.message, fl.errors.GraphChangeWarning)] == []


def test_a_scheduler_of_another_optimizer_is_refused(tmp_path):
    model = Net()
    with pytest.raises(fl.errors.TrainerError, match="made for another optimizer"):
        Trainer("CPU", model_dir=tmp_path, model=model, optimizer=adamw(model), schedulers=[decay(adamw(model))])


@pytest.mark.parametrize(
    "options, says",
    [
        ({}, "has no end"),
        ({"max_steps": 0}, "max_steps=0 is not positive"),
        ({"max_steps": "10"}, "max_steps='10' is not an integer"),
        ({"max_epochs": 1.5}, "max_epochs=1.5 is not an integer"),
        ({"max_steps": 1, "clip_grad_norm": "1"}, "clip_grad_norm='1' is not a number"),
        ({"max_steps": 1, "clip_grad_norm": 1.0, "clip_grad_value": 1.0}, "not both"),
    ],
)
def test_invalid_loops_are_refused(options, says):
    with pytest.raises(fl.errors.TrainerError, match=says):
        TrainingLoop(**options)
