import json
import sys
import types

import pytest
import torch
from torch import nn

from firstloss import cli


class Scaled(nn.Module):
    """Its constructor does more than its layers' `reset_parameters`."""

    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("angles", torch.arange(float(width)), persistent=False)
        with torch.no_grad():
            self.layer.weight.mul_(0.1)


class Initialized(Scaled):
    def init_weights(self):
        self.layer.reset_parameters()
        self.norm.reset_parameters()
        self.angles.copy_(torch.arange(float(len(self.angles))))
        self.scale.fill_(1.0)


class Derived(Scaled):
    def init_weights(self):
        self.layer.reset_parameters()
        self.angles.copy_(torch.arange(float(len(self.angles))))
        self.scale.copy_(self.norm.weight.sum() + 1000)  # of ones, if the constructor has run


@pytest.fixture(autouse=True)
def targets(monkeypatch):
    module = types.ModuleType("targets_of_check_init")
    module.Scaled, module.Initialized, module.Derived = Scaled, Initialized, Derived
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_wrong_weights_are_named_with_their_classes(capsys):
    assert cli.main(["check-init", "targets_of_check_init:Scaled", "--json"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["tensors"] == 6 and found["initialization"] == "reset_parameters() of each module"
    wrong = {row["name"]: row for row in found["wrong"]}
    assert {name: row["why"] for name, row in wrong.items()} == {"scale": "unwritten", "angles": "unwritten"}
    assert wrong["angles"]["class"].startswith("Scaled at ") and wrong["angles"]["shape"] == [4]
    assert "2 of 6 tensors are not what the constructor makes; first scale: unwritten" in captured.err


def test_what_is_computed_from_unwritten_weights_is_unwritten_too(capsys):
    assert cli.main(["check-init", "targets_of_check_init:Derived", "--arg", "width=6"]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[:-1]}
    assert sorted(rows) == ["norm.bias", "norm.weight", "scale"] and "unwritten" in rows["scale"]
    assert rows["norm.weight"].split()[1:3] == ["6", "unwritten"]
    assert lines[-1].startswith("on the meta device, then to_empty() and model.init_weights(): 3 of 6 tensors")


def test_what_is_right_is_said(capsys):
    assert cli.main(["check-init", "targets_of_check_init:Initialized"]) == 0
    assert capsys.readouterr().out.startswith("on the meta device, then to_empty() and model.init_weights(): 0 of 6")


def test_what_each_rank_draws_for_itself(capsys):
    assert cli.main(["check-init", "targets_of_check_init:Initialized", "--ranks", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["drawn_by_rank"]}
    assert sorted(rows) == ["layer.bias", "layer.weight"] and not found["wrong"]
    assert rows["layer.weight"]["shape"] == [2, 4] and rows["layer.weight"]["class"].startswith("Linear at ")
    assert cli.main(["check-init", "targets_of_check_init:Initialized", "--ranks", "3"]) == 0
    assert "2x4  each of 3 ranks draws its own part" in capsys.readouterr().out


def test_a_target_that_is_no_module(capsys):
    assert cli.main(["check-init", "torch:ones", "--arg", "size=[2]"]) == 1
    assert "not a module" in capsys.readouterr().err
