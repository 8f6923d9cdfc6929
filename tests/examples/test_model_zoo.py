"""Programs from Model Zoo's documentation: the same losses on "CSX" and "CPU", interrupted, resumed, validated."""

import copy
import importlib
import json
import types
from pathlib import Path

import pytest
import torch
import yaml

import firstloss as fl
from firstloss import no_effect
from firstloss.cli import main, modelzoo
from firstloss.errors import ConfigError, NoEffectWarning, TrainerError
from firstloss.trainer import callbacks

ROOT = Path(__file__).parents[2]
NAMES = ["gpt2", "bert", "vision"]
STEPS = 12


@pytest.fixture(autouse=True)
def root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def make(name, device, folder, max_steps=STEPS):
    """Returns (the Trainer, its loaders)."""
    if name != "gpt2":
        module = importlib.reload(importlib.import_module(f"examples.model_zoo.{name}"))  # as in a separate process
        return module.trainer(device, str(folder), max_steps), module.train_dataloader, module.val_dataloader
    content = yaml.safe_load((ROOT / "examples" / "model_zoo" / "gpt2.yaml").read_text())
    content = copy.deepcopy(content)
    init = content["trainer"]["init"]
    init["model_dir"] = str(folder)
    init["backend"]["backend_type"] = device
    init["model"].update(hidden_size=16, num_hidden_layers=2, num_heads=2)  # the unchanged file: see below
    run = modelzoo.read(content, [f"--trainer.init.loop.max_steps={max_steps}"])
    fit = run.calls["fit"]
    return run.trainer, fit["train_dataloader"], fit["val_dataloader"]


def logged(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], key): line[key] for line in lines for key in line if key == "loss" or key.startswith("val_")}


def run(name, device, folder, stops=(STEPS,)):
    """The logged values of a run stopped at each of `stops`, and the validation results of each checkpoint."""
    for steps in stops:
        trainer, train, val = make(name, device, folder, steps)
        trainer.fit(train, val)
    validation = trainer.validate_all([val], str(folder / "checkpoints" / "step_*"))
    return logged(folder), {Path(path).name: metrics for path, metrics in validation.items()}


@pytest.mark.parametrize("name", NAMES)
def test_losses_agree_on_both_backends_and_when_resumed(name, tmp_path):
    losses, validated = {}, {}
    for device in ("CSX", "CPU"):
        losses[device], validated[device] = run(name, device, tmp_path / device)
    resumed, validated_resumed = run(name, "CSX", tmp_path / "resumed", stops=(5, STEPS))
    steps = {step for step, key in losses["CPU"] if key == "loss"}
    assert steps == set(range(1, STEPS + 1))
    assert losses["CSX"].keys() == losses["CPU"].keys()
    for key, loss in losses["CPU"].items():
        assert losses["CSX"][key] == pytest.approx(loss, abs=1e-5), key  # the project requires this of these programs
    assert list(validated["CPU"]) == ["step_4", "step_8", "step_12"]
    for checkpoint, metrics in validated["CPU"].items():
        assert validated["CSX"][checkpoint] == pytest.approx(metrics, abs=1e-5)  # as above
    # Stopped and resumed: bit-identical where both logged; a stopped run validates once more at its end.
    for key, loss in losses["CSX"].items():
        if key in resumed:
            assert resumed[key] == loss, key
    assert {key for key in losses["CSX"] if key[1] == "loss"} <= resumed.keys()
    assert validated_resumed["step_12"] == validated["CSX"]["step_12"]
    if name != "gpt2":
        assert "val_accuracy" in validated["CPU"]["step_12"]
    assert min(losses["CPU"][step, "loss"] for step in (11, 12)) < losses["CPU"][1, "loss"]


@pytest.mark.own_compile_cache
def test_the_command_runs_a_model_zoo_file(tmp_path, capsys):
    folder = tmp_path / "run"
    overrides = [f"--trainer.init.model_dir={folder}", "--trainer.init.loop.max_steps=4"]
    assert main(["fit", "examples/model_zoo/gpt2.yaml", *overrides, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step"] == 4 and (folder / "tensorboard").is_dir() and (folder / "artifacts" / "compiled").is_dir()
    paths = f"--trainer.validate_all.ckpt_paths={folder}/checkpoints/step_*"
    assert main(["validate", "examples/model_zoo/gpt2.yaml", *overrides, paths, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["validate_all"]) == [str(folder / "checkpoints" / "step_4")]


WRONG = {
    "--trainer.init.looop.max_steps=4": "Did you mean 'loop'",
    "--trainer.init.loop.max_step=4": "Did you mean 'max_steps'",
    "--trainer.init.optimizer={AdmW: {}}": "Did you mean 'AdamW'",
    "--trainer.init.optimizer={AdamW: {beta: 1}}": "Did you mean 'betas'",
    "--trainer.init.schedulers=[{LinearLr: {}}]": "Did you mean 'LinearLR'",
    "--trainer.init.sparsity={}": "sparse weights",
    "--trainer.init.model={hidden_size: 3}": "name: package.module.Class",
    "--trainer.fit.train_dataloader={batch_size: 3}": "data_processor",
}


@pytest.mark.parametrize("override", WRONG)
def test_mistakes_are_one_line_errors(override, tmp_path, capsys):
    folder = f"--trainer.init.model_dir={tmp_path}"
    assert main(["fit", "examples/model_zoo/gpt2.yaml", folder, override]) == 1
    error = capsys.readouterr().err.strip()
    assert WRONG[override] in error and "\n" not in error


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_schema_accepts_what_the_commands_accept(options, capsys):
    """The schema accepts the configs that the commands accept, and its keys are those of the classes."""
    assert main(["schema", *options]) == 0
    schema = json.loads(capsys.readouterr().out)
    model_zoos, firstlosses, phases = schema["properties"]["trainer"]["anyOf"]
    file = yaml.safe_load((ROOT / "examples" / "model_zoo" / "gpt2.yaml").read_text())["trainer"]
    assert valid(file, model_zoos) and not valid(file, firstlosses)
    assert valid([{"trainer": file}] * 2, phases) and not valid([file], phases) and not valid([], phases)
    file["init"]["loop"]["max_step"] = 3
    assert not valid(file, model_zoos)
    del file["init"]["loop"]["max_step"]
    file["init"]["callbacks"].append({"CheckLos": {}})
    assert not valid(file, model_zoos)
    other = yaml.safe_load((ROOT / "examples" / "byte_lm.yaml").read_text())["trainer"]
    assert valid(other, firstlosses) and not valid(other, model_zoos)
    other["loop"]["max_step"] = 3
    assert not valid(other, firstlosses)


def content():
    return yaml.safe_load((ROOT / "examples" / "model_zoo" / "gpt2.yaml").read_text())


def test_biases_and_norms_do_not_decay(tmp_path):
    described = content()
    init = described["trainer"]["init"]
    init |= {"model_dir": str(tmp_path), "backend": {"backend_type": "CPU"}, "logging": {"log_level": "info"}}
    init["checkpoint"] = {"steps": 0}
    init["optimizer"] = {"adamw": {"learning_rate": 0.1, "weight_decay": 0.1}}
    init["model"].update(hidden_size=16, num_hidden_layers=2, num_heads=2)
    trainer, calls = modelzoo.read(described, ["--trainer.init.loop.max_steps=1"])
    trainer.fit(**calls["fit"])
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    decayed, others = trainer.optimizer.param_groups
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert not [names[p] for p in decayed["params"] if p.ndim < 2]
    assert [names[p] for p in others["params"]] == [name for p, name in names.items() if p.ndim < 2]


@pytest.mark.parametrize("name", ["Adam", "adam", "ADAMW", "AdaFactor", "muon", "sgd", "Lamb"])
def test_optimizers_are_found_in_either_case(name):
    from firstloss.cstorch import optim

    weights = {"Muon": torch.nn.Linear(2, 2, bias=False)}.get(name.title(), torch.nn.Linear(2, 2))
    made = modelzoo._optimizer({name: {"learning_rate": 0.1}})(weights)
    assert isinstance(made, optim.Optimizer) and type(made).__name__.lower() == name.lower()


class Scaled(torch.nn.Linear):
    lr_adjustment_groups = {"decoder_kernel": types.SimpleNamespace(scale=0.5), "embedding": None}


def test_rates_of_parts_of_a_model_are_an_error():
    with pytest.raises(ConfigError, match="adjust_learning_rate"):
        modelzoo._optimizer({"AdamW": {"adjust_learning_rate": {"decoder_kernel": 0.5}}})
    optimizer = modelzoo._optimizer({"AdamW": {"learning_rate": 0.1}})
    with pytest.raises(ConfigError, match="Scaled asks for rates of their own for decoder_kernel, embedding"):
        optimizer(Scaled(2, 2))
    with pytest.raises(ConfigError, match="ScalePerParamLR"):
        spec = {"ScalePerParamLR": {"scheduler": {"ConstantLR": {"learning_rate": 0.1}}}}
        modelzoo.schedulers(optimizer(torch.nn.Linear(2, 2)), spec)


TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}


def valid(value, schema):
    """Implements the subset of JSON Schema in use."""
    if "anyOf" in schema:
        return any(valid(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(
        (k == "null" and value is None) or (k != "null" and isinstance(value, TYPES[k])) for k in kinds
    ):
        return False
    if isinstance(value, list) and "items" in schema:
        return len(value) >= schema.get("minItems", 0) and all(valid(item, schema["items"]) for item in value)
    if not isinstance(value, dict):
        return True
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
        return False
    if any(key not in value for key in schema.get("required", ())):
        return False
    properties = schema.get("properties", {})
    for key, item in value.items():
        if key in properties:
            if not valid(item, properties[key]):
                return False
        elif schema.get("additionalProperties", True) is False and not ("." in key and "patternProperties" in schema):
            return False
    return True


ACCEPTED = {
    "--trainer.init.callbacks=[{ScopedTrainFlags: {csx.performance.micro_batch_size: 1}}]": "ScopedTrainFlags",
    "--trainer.init.precision.precision_opt_level=1": "precision_opt_level",
    "--trainer.init.autorestart={max_num_restarts: 3}": "autorestart",
    "--trainer.init.backend={backend_type: CPU, cluster_config: {num_csx: 1, mount_dirs: [/data]}}": "mount_dirs",
}


@pytest.mark.parametrize("override", ACCEPTED)
def test_settings_of_cerebras_hardware_are_accepted_and_named(override, tmp_path, monkeypatch):
    monkeypatch.setattr(no_effect, "_said", set())
    folder = [f"--trainer.init.model_dir={tmp_path}", "--trainer.init.loop.max_steps=1"]
    with pytest.warns(NoEffectWarning, match=f"{ACCEPTED[override]} is for Cerebras' hardware"):
        assert main(["fit", "examples/model_zoo/gpt2.yaml", *folder, override]) == 0


def small(folder, **more):
    """A phase of the example on "CPU", of three steps."""
    init = copy.deepcopy(content()["trainer"]["init"])
    init["model"].update(hidden_size=16, num_hidden_layers=1, num_heads=2)
    init |= {"model_dir": str(folder), "backend": {"backend_type": "CPU"}, "loop": {"max_steps": 3}, "loggers": []}
    fit = {"train_dataloader": content()["trainer"]["fit"]["train_dataloader"]}
    return {"trainer": {"init": init | more, "fit": fit}}


@pytest.mark.parametrize(
    "states, begins_at, momenta", [("model, optimizer", 0, True), (["model"], 0, False), ("all", 3, True)]
)
def test_phases_run_in_turn_and_begin_with_the_wanted_states(states, begins_at, momenta, tmp_path, capsys):
    first, second = small(tmp_path / "first"), small(tmp_path / "second")
    second["trainer"]["init"]["callbacks"] = [{"LoadCheckpointStates": {"load_checkpoint_states": states}}]
    second["trainer"]["init"]["loop"] = {"max_steps": begins_at + 1}
    second["trainer"]["fit"]["ckpt_path"] = str(tmp_path / "first" / "checkpoints" / "step_3")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"trainer": [first, second]}))
    assert main(["fit", str(path)]) == 0
    assert capsys.readouterr().out.count(": step ") == 2
    (end,) = (tmp_path / "second" / "checkpoints").iterdir()
    assert end.name == f"step_{begins_at + 1}"
    steps = {int(entries["step"]) for entries in fl.load(end)["optimizer"]["state"].values()}
    assert steps == {4 if momenta else 1}


@pytest.mark.parametrize("states", ["weights", "optimizer", ["model", "everything"]])
def test_states_that_cannot_be_loaded_are_an_error(states):
    with pytest.raises(TrainerError, match="LoadCheckpointStates: "):
        callbacks.LoadCheckpointStates(states)
