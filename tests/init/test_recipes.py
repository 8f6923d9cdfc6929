"""Recipes and the report of a captured module."""

import json

import pytest
import torch
from torch import nn

import firstloss as fl


def build():
    model = nn.Sequential(nn.Embedding(20, 4, padding_idx=1), nn.Linear(4, 20), nn.BatchNorm1d(4), nn.LSTM(3, 4))
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[1].bias.mul_(2).add_(1)
    nn.init.normal_(model[3].weight_ih_l0, std=0.02)
    nn.init.uniform_(model[3].weight_ih_l0, -1, 1)
    model.copied = nn.Parameter(model[3].bias_hh_l0.half())
    model.table = torch.arange(4) / 2
    return model


def test_every_weight_has_a_recipe():
    module = fl.deferred_init(build)
    recipes = fl.init_program(module).recipes
    assert {name for name, _ in module.named_parameters(remove_duplicate=False)} <= recipes.keys()
    assert {name for name, _ in module.named_buffers()} <= recipes.keys()
    assert recipes["0.weight"] is recipes["1.weight"]
    assert recipes["0.weight"].shape == (20, 4) and recipes["copied"].dtype == torch.float16


def test_recipes_are_described_in_words():
    recipes = {name: str(recipe) for name, recipe in fl.init_program(fl.deferred_init(build)).recipes.items()}
    assert recipes["0.weight"] == "normal(0, 1), then zeros in part"
    assert recipes["1.bias"] == "uniform(-0.5, 0.5), then times 2, then plus 1"
    assert recipes["2.running_var"] == "ones"
    assert recipes["2.num_batches_tracked"] == "zeros"
    assert recipes["3.weight_ih_l0"] == "uniform(-1, 1)"
    assert recipes["copied"] == "uniform(-0.5, 0.5), then as float16"


@pytest.mark.parametrize(
    "edit",
    [
        lambda w, t: w.fill_(t),
        lambda w, t: w.mul_(t),
        lambda w, t: w.clamp_(min=t),
        lambda w, t: w.copy_(t),
        lambda w, t: w.lerp_(t.expand(3, 4), t),
        lambda w, t: torch.where(w > 0, t, w),
    ],
)
def test_recipes_with_tensors_are_described_without_internal_objects(edit):
    def build():
        module = nn.Linear(4, 3)
        with torch.no_grad():
            module.made = edit(module.weight, torch.rand(()))
        return module

    report = str(fl.init_program(fl.deferred_init(build)).report())
    assert "object at" not in report and "Ref(" not in report


def test_the_report_shows_positions_and_dropped_fills():
    report = fl.init_program(fl.deferred_init(build)).report()
    rows = {row.weight: row for row in report.rows}
    assert "1.weight" not in rows and rows["0.weight"].tied == ("1.weight",)
    assert rows["0.weight"].position == 0
    assert rows["1.bias"].position == 80 + 80  # after the embedding's normals and the dead weight of the linear layer
    assert rows["3.weight_ih_l0"].dead_fills == 2 and report.dead_fills == 2
    assert rows["2.running_mean"].position is None
    assert report.bytes == sum(row.bytes for row in report.rows)
    table = str(report)
    assert "uniform(-1, 1)" in table and "0.weight (= 1.weight)" in table and "2 dead fills dropped" in table
    assert json.loads(json.dumps(report.to_dict()))["weights"][0]["weight"] == "copied"


def test_streams_are_distinguished():
    def seeded():
        first = nn.Linear(3, 3)
        torch.manual_seed(7)
        return nn.Sequential(first, nn.Linear(3, 3))

    rows = {row.weight: row for row in fl.init_program(fl.deferred_init(seeded)).report().rows}
    assert (rows["0.weight"].stream, rows["1.weight"].stream) == (0, 1)
    assert rows["1.weight"].position == 0


def test_the_program_names_the_users_lines():
    program = fl.init_program(fl.deferred_init(build))
    assert len(program) == len(program.program.nodes) > 10
    assert f"{__file__}:" in str(program) and "aten.normal_.default" in str(program)


def test_a_weight_from_an_operation_with_side_effects_has_a_recipe():
    class Shown(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("shown", self.norm(torch.randn(2, 4)).detach())

    recipes = fl.init_program(fl.deferred_init(Shown)).recipes
    assert recipes["shown"].dead_fills == 0 and "norm.running_mean" in recipes


def test_nothing_deferred_is_an_error():
    with pytest.raises(fl.errors.NothingDeferredError, match="Linear has no deferred weight"):
        fl.init_program(nn.Linear(2, 2))


def test_inspection_computes_nothing():
    module = fl.deferred_init(lambda: nn.Linear(1 << 20, 1 << 20))  # 4 TB
    assert "uniform" in str(fl.init_program(module).report())
    assert fl.is_deferred(module)
