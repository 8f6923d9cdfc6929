"""`firstloss fit` and `validate`: a run from a config file, and one-line errors."""

import dataclasses
import inspect
import itertools
import json

import pytest
import yaml

from firstloss.cli import main

pytest.importorskip("jsonargparse")

MODEL = {"class_path": "tests.trainer.small.Net", "init_args": {"dropout": 0.2}}


@pytest.fixture
def config(tmp_path):
    """Write a run's config file; a dict of changes is merged into its "trainer"."""

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
        still = {**data, "init_args": {**data["init_args"], "shuffle": False}}  # the same batches and the same rounding
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"trainer": trainer, "train_dataloader": data, "val_dataloader": still}))
        return str(path)

    return write


WRONG_METRIC = {
    "max_steps": 3,
    "validation": {"metrics": {"a": {"class_path": "torchmetrics.MeanMetric", "init_args": {"no": 1}}}},
}
CURVE = {"initial_learning_rate": 0.1, "end_learning_rate": 0.0, "total_iters": 4}


def test_a_run_is_trained_and_validated(config, tmp_path, capsys):
    assert main(["fit", config(), "--trainer.loop.max_steps=6", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 6 and result["checkpoint"].endswith("step_6")
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["trainer"]["loop"]["max_steps"] == 6 and resolved["trainer"]["model"] == MODEL
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert main(["validate", str(tmp_path / "run" / "config.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] == last["val_loss"]
    # the resolved config reproduces the run
    again = ["fit", str(tmp_path / "run" / "config.yaml"), f"--trainer.model_dir={tmp_path / 'again'}"]
    assert main(again) == 0
    assert "step 6" in capsys.readouterr().out
    other = json.loads((tmp_path / "again" / "metrics.jsonl").read_text().splitlines()[-1])
    assert other["val_loss"] == last["val_loss"]


def test_the_trainer_constructs_the_model(config, capsys, monkeypatch):
    """Also if a function takes arguments; otherwise the model would be constructed eagerly, before the backend could
    defer it."""
    from tests.trainer import small

    constructed = []
    monkeypatch.setattr(small, "build", lambda: None, raising=False)

    def build(dropout: float = 0.5) -> small.nn.Module:
        constructed.append(dropout)
        return small.Net(dropout)

    monkeypatch.setattr(small, "build", build)
    from firstloss.cli import config as configuration

    file = config(model={"class_path": "tests.trainer.small.build", "init_args": {"dropout": 0.3}})
    parser, read = configuration.read("fit", file, [])
    parsed = configuration.instantiate("fit", parser, read)
    assert constructed == []
    parsed.trainer.fit(parsed.train_dataloader, parsed.val_dataloader)
    assert constructed == [0.3]


@pytest.mark.parametrize(
    "changes, arguments, says",
    [
        ({"loop": {"max_step": 3}}, [], "trainer.loop has no 'max_step': did you mean 'max_steps'?"),
        ({"loop": {"max_steps": 3, "validation": {"max_batch": 3}}}, [], "validation has no 'max_batch': did you mean"),
        ({"lop": {"max_steps": 3}}, [], "trainer has no 'lop': did you mean 'loop'?"),
        ({"loop": {"max_steps": "ten"}}, [], "trainer.loop.max_steps is 'ten', but int was expected."),
        ({"devise": "CPU"}, [], "trainer has no 'devise': did you mean 'device'?"),
        ({"model": {**MODEL, "init_args": {"dropuot": 1}}}, [], "Net has no 'dropuot': did you mean 'dropout'?"),
        ({}, ["--trainer.devise=CPU"], "there is no --trainer.devise: did you mean --trainer.device?"),
        ({}, ["--trainer.loop.max_step=3"], "no --trainer.loop.max_step: did you mean --trainer.loop.max_steps?"),
        ({}, ["--modle=3"], "there is no --modle: see --print_config."),
        ({}, ["--trainer.optimizer.init_args.lrr=3"], "SGD has no 'lrr': did you mean 'lr'?"),
        ({"model": "tests.trainer.small.Nett"}, [], "tests.trainer.small has no 'Nett': did you mean 'Net'?"),
        ({"model": "nowhere.Net"}, [], "trainer.model: there is no module 'nowhere' (in 'nowhere.Net')."),
        ({"model": "Nettle"}, [], "trainer.model: "),
        ({"optimizer": "torch.optim.SDG"}, [], "torch.optim has no 'SDG': did you mean 'SGD'?"),
        (
            {"optimizer": "tests.trainer.small.Net"},
            [],
            "trainer.optimizer: tests.trainer.small.Net is not a subclass of Optimizer.",
        ),
        ({"callbacks": ["firstloss.trainer.EarlyStopp"]}, [], "has no 'EarlyStopp': did you mean 'EarlyStop'?"),
        (
            {"callbacks": ["tests.trainer.small.Net"]},
            [],
            "trainer.callbacks: tests.trainer.small.Net is not a subclass of Callback.",
        ),
        ({"loop": {"max_steps": 0}}, [], "max_steps=0 is not positive"),
        ({"loop": {}}, [], "TrainingLoop has no end."),
        ({"precision": {"dtype": "bf16"}}, [], "fit: Precision: dtype='bf16' is not one of float32, bfloat16"),
        ({"mesh": "{fsdp:8}"}, [], 'but dict was expected (in YAML a space follows each ":").'),
        ({"mesh": {"fsdp": 8}}, [], "backend 'CPU' runs on one device."),
        (
            {"loop": {"max_steps": 3, "validation": {"metrics": {"a": "x.Y"}}}},
            [],
            "metrics.a is 'x.Y'. Write {class_path",
        ),
        ({"loop": WRONG_METRIC}, [], "torchmetrics.MeanMetric: "),
    ],
)
def test_a_wrong_file_is_a_one_line_error(changes, arguments, says, config, capsys):
    assert main(["fit", config(**changes), *arguments]) == 1
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize(
    "text, says",
    [
        ("model: tests.trainer.small.Net", "the run has no 'model': write it under trainer, as trainer.model."),
        ("- 3", 'not a run file: it must be a mapping with the key "trainer:".'),
        ("trainer: {a: [}", "not valid YAML: "),
        ("train_dataloader: tests.trainer.small.loader", "trainer.model is missing."),
    ],
)
def test_a_file_that_is_not_a_run_is_an_error(text, says, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(text)
    assert main(["fit", str(tmp_path / "run.yaml")]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, rate",
    [
        (["--trainer.optimizer.lr=0.5"], 0.5),
        (["--trainer.optimizer", "AdamW", "--trainer.optimizer.weight_decay=0"], 0.1),
        (["--trainer.optimizer=tests.trainer.small.adamw"], 0.01),
        (["--trainer.optimizer=tests.trainer.small.decayed", "--trainer.optimizer.rate=0.125"], 0.125),
        (['--trainer.optimizer={"class_path": "tests.trainer.small.decayed"}'], 0.25),
    ],
)
def test_optimizers_may_be_classes_or_functions(arguments, rate, config, tmp_path, capsys):
    """A class gets the parameters, a function the model; both are called after the model has been constructed."""
    arguments = ["fit", config(schedulers=None), *arguments, "--json"]
    assert main(arguments) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["lr"] == rate
    capsys.readouterr()
    # resolving the resolved config changes nothing
    assert main(["fit", str(tmp_path / "run" / "config.yaml"), f"--trainer.model_dir={tmp_path / 'again'}"]) == 0
    assert json.loads((tmp_path / "again" / "metrics.jsonl").read_text().splitlines()[0]) | RATES == (
        json.loads(lines[0]) | RATES
    )


RATES = {"steps_per_second": 0, "samples_per_second": 0}


@pytest.mark.parametrize(
    "schedulers, second",
    [
        ("tests.trainer.small.decay", 0.1),
        ({"class_path": "StepLR", "init_args": {"step_size": 1}}, 0.01),
        ({"class_path": "tests.trainer.small.decay_by", "init_args": {"factor": 0.5}}, 0.05),
        ({"class_path": "ExponentialLR", "init_args": {"gamma": 0.25}}, 0.025),
    ],
)
def test_schedulers_may_be_classes_or_functions(schedulers, second, config, tmp_path):
    assert main(["fit", config(schedulers=schedulers), "--trainer.logging.log_steps=1"]) == 0
    rates = [json.loads(line).get("lr") for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rates[:2] == pytest.approx([0.1, second], rel=1e-15)  # a float64 product


def test_torchmetrics_can_be_configured(config, tmp_path):
    pytest.importorskip("torchmetrics")
    accuracy = {
        "class_path": "torchmetrics.Accuracy", "init_args": {"task": "multiclass", "num_classes": 4, "average": "micro"}
    }  # fmt: skip
    assert main(["fit", config(loop={"max_steps": 2, "validation": {"metrics": {"exact": accuracy}}})]) == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val_exact"] == pytest.approx(last["val_accuracy"], rel=1e-6)  # a quotient, and a mean of quotients


def test_checkpoints_are_chosen_by_name(config, tmp_path, capsys):
    """`best` and `last` are names; null selects none."""
    file = config(checkpoint={"steps": 1, "keep_last": None, "best": "val_loss"}, loop={"max_steps": 3})
    assert main(["validate", file]) == 1
    assert "no weights to validate" in capsys.readouterr().err
    assert main(["fit", file, "--trainer.loop.eval_every_steps=1"]) == 0
    best = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
    capsys.readouterr()
    assert main(["validate", file, "--ckpt_path=best", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] == best["value"]
    assert main(["fit", file, "--ckpt_path=null", "--trainer.loop.max_steps=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1


def test_a_missing_file_is_an_error(capsys):
    assert main(["fit", "nowhere.yaml"]) == 1
    assert capsys.readouterr().err == "firstloss fit: nowhere.yaml: no such file.\n"


def test_print_config_shows_the_overridden_values(config, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", config(), "--print_config"])
    assert stopped.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert printed["loop"]["max_steps"] == 4


def test_print_config_shows_every_key(capsys):
    """Also without a file, with the defaults: every key that a config may have."""
    from firstloss.trainer import Checkpoint, Trainer, TrainingLoop

    with pytest.raises(SystemExit):
        main(["fit", "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"].keys() | {"backend"} == set(inspect.signature(Trainer).parameters) | {
        "artifact_dir", "mesh", "same_run", "cluster_config"
    }  # fmt: skip
    assert printed["trainer"]["loop"].keys() == TrainingLoop.__dataclass_fields__.keys()
    assert printed["trainer"]["checkpoint"] == dataclasses.asdict(Checkpoint())
    assert printed["ckpt_path"] == "last"


def test_other_commands_refuse_unknown_arguments(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "torch.nn:Linear", "--trainer.loop.max_steps=3"])
    assert "unrecognized arguments: --trainer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"class_path": "firstloss.trainer.MixedPrecision", "init_args": {"fp16_type": "bfloat16"}}, "bfloat16"),
    ],
    ids=["ours", "Model Zoo's"],
)
def test_model_zoos_names_for_precision_and_workers_work(config, given, dtype):
    file = config(precision=given, cluster_config={"num_csx": 1, "num_workers_per_csx": 1})
    from firstloss.cli import config as configuration

    trainer = configuration.instantiate("fit", *configuration.read("fit", file, [])).trainer
    assert trainer.precision.dtype == dtype
    assert trainer.backend.cluster_config.num_workers_per_csx == 1


BOMB = list(itertools.pairwise("abcdefghijklmnopqrstuvwxyz"))
BAD_YAML = {
    "a bomb of aliases": ("a: &a [1]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in BOMB), "10,000"),
    "a list that contains itself": ("a: &a [*a]\n", "what it is a part of"),
    "another encoding": (b"\xff\xfe\x00", "utf-8"),
    "a large file": ("a: " + "1" * (1 << 20), "the largest run file"),
    "code": ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
}


@pytest.mark.parametrize("case", BAD_YAML)
def test_yaml_that_nobody_would_write_is_an_error(case, tmp_path, capsys):
    content, message = BAD_YAML[case]
    (tmp_path / "bad.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["fit", str(tmp_path / "bad.yaml")]) == 1
    error = capsys.readouterr().err
    assert "bad.yaml: " in error and message in error and len(error) < 500
