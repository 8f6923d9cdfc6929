"""`firstloss fit` and `validate`: a run from a file, and what is wrong with one, in a line."""

import json

import pytest
import yaml

from firstloss.cli import main

pytest.importorskip("jsonargparse")

MODEL = {"class_path": "tests.trainer.small.Net", "init_args": {"dropout": 0.2}}


@pytest.fixture
def config(tmp_path):
    """Writes a run's file; a dict of changes is merged into its "trainer"."""

    def write(**changes):
        trainer = {
            "device": "CPU",
            "model_dir": str(tmp_path / "run"),
            "seed": 0,
            "model": MODEL,
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
            "schedulers": {"class_path": "firstloss.optim.lr_scheduler.LinearLR", "init_args": CURVE},
            "loop": {"max_steps": 4},
            "callbacks": [{"class_path": "firstloss.trainer.EarlyStop", "init_args": {"patience": 2}}],
            "loggers": [{"class_path": "firstloss.trainer.loggers.JSONLogger"}],
            **changes,
        }
        data = {"class_path": "tests.trainer.small.loader", "init_args": {"count": 32}}
        still = {**data, "init_args": {**data["init_args"], "shuffle": False}}  # the same batches, the same rounding
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"trainer": trainer, "train_dataloader": data, "val_dataloader": still}))
        return str(path)

    return write


CURVE = {"initial_learning_rate": 0.1, "end_learning_rate": 0.0, "total_iters": 4}


def test_a_run_and_its_validation(config, tmp_path, capsys):
    assert main(["fit", config(), "--trainer.loop.max_steps=6", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 6 and result["checkpoint"].endswith("step_6")
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["trainer"]["loop"]["max_steps"] == 6 and resolved["trainer"]["model"] == MODEL
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert main(["validate", str(tmp_path / "run" / "config.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] == last["val_loss"]
    # the resolved file repeats the run
    again = ["fit", str(tmp_path / "run" / "config.yaml"), f"--trainer.model_dir={tmp_path / 'again'}"]
    assert main(again) == 0
    assert "step 6" in capsys.readouterr().out
    other = json.loads((tmp_path / "again" / "metrics.jsonl").read_text().splitlines()[-1])
    assert other["val_loss"] == last["val_loss"]


def test_the_model_is_called_by_the_trainer(config, capsys, monkeypatch):
    """A function with arguments too: else the model would be made eagerly, before the backend could defer it."""
    from tests.trainer import small

    made = []
    monkeypatch.setattr(small, "build", lambda: None, raising=False)

    def build(dropout: float = 0.5) -> small.nn.Module:
        made.append(dropout)
        return small.Net(dropout)

    monkeypatch.setattr(small, "build", build)
    from firstloss.cli import config as configuration

    file = config(model={"class_path": "tests.trainer.small.build", "init_args": {"dropout": 0.3}})
    parser, read = configuration.read("fit", file, [])
    given = configuration.instantiate(parser, read)
    assert made == []
    given.trainer.fit(given.train_dataloader)
    assert made == [0.3]


@pytest.mark.parametrize(
    "changes, arguments, says",
    [
        ({"loop": {"max_step": 3}}, [], "TrainingLoop has no 'max_step': did you mean 'max_steps'?"),
        ({"loop": {"max_steps": "ten"}}, [], "trainer.loop.max_steps is 'ten', where int was expected."),
        ({"devise": "CPU"}, [], "trainer has no 'devise': did you mean 'device'?"),
        ({"model": {**MODEL, "init_args": {"dropuot": 1}}}, [], "Net has no 'dropuot': did you mean 'dropout'?"),
        ({}, ["--trainer.devise=CPU"], "there is no --trainer.devise: did you mean --trainer.device?"),
        ({}, ["--trainer.loop.max_step=3"], "TrainingLoop has no 'max_step': did you mean 'max_steps'?"),
        ({}, ["--trainer.optimizer.init_args.lrr=3"], "SGD has no 'lrr': did you mean 'lr'?"),
        (
            {"model": "tests.trainer.small.Nett"},
            [],
            "'tests.trainer.small' has no attribute 'Nett'.",
        ),
        ({"schedulers": "tests.trainer.small.decay"}, [], "does not say what it returns. Write -> LRScheduler"),
        ({"loop": {"max_steps": 0}}, [], "max_steps=0 is not above 0"),
    ],
)
def test_what_is_wrong_is_one_line(changes, arguments, says, config, capsys):
    assert main(["fit", config(**changes), *arguments]) == 1
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_file_that_is_not_there(capsys):
    assert main(["fit", "nowhere.yaml"]) == 1
    assert capsys.readouterr().err == "firstloss fit: nowhere.yaml: there is no such file.\n"


def test_print_config(config, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", config(), "--print_config"])
    assert stopped.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["loop"]["max_steps"] == 4


def test_other_commands_take_no_strangers(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "torch.nn:Linear", "--trainer.loop.max_steps=3"])
    assert "unrecognized arguments: --trainer" in capsys.readouterr().err
