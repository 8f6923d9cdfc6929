import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstloss import cli
from firstloss.cli import mesh

LINEAR = ["torch.nn:Linear", "--arg", "in_features=300", "--arg", "out_features=7"]


def test_the_table_is_printed(capsys):
    assert cli.main(["inspect", *LINEAR]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == "weight 7x300 float32 uniform(-0.057735, 0.057735) 0".split()
    assert lines[-1] == "2 weights, 2,107 parameters, 8,428 bytes, 0 dead fills dropped"


def test_the_counter_policy_numbers_its_draws(capsys):
    assert cli.main(["inspect", *LINEAR, "--rng", "counter", "--json"]) == 0
    assert [row["position"] for row in json.loads(capsys.readouterr().out)["weights"]] == [0, 1]


def test_405_billion_parameters_on_512_ranks(llama_405b, capsys):
    assert cli.main(["inspect", llama_405b(), "--mesh", "fsdp=64,tp=8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"] == 405_853_388_800 and report["dead_fills"] == 884
    rows = {row["weight"]: row for row in report["weights"]}
    up, down = (rows[f"model.layers.7.mlp.{name}_proj.weight"] for name in ("up", "down"))
    assert up["recipe"] == "normal(0, 0.02)" and up["dead_fills"] == 1 and up["position"] > 4 * 10**11
    assert up["shape_per_rank"] == [53248 // 512, 16384] and up["cut"] == [["tp", "fsdp"], []]
    assert down["shape_per_rank"] == [16384 // 64, 53248 // 8] and down["cut"] == [["fsdp"], ["tp"]]
    assert rows["model.layers.0.input_layernorm.weight"]["cut"] == [["fsdp"]]
    assert rows["lm_head.weight"]["bytes_per_rank"] == math.ceil(128256 / 512) * 16384 * 4
    assert report["bytes_per_rank"] == sum(row["bytes_per_rank"] for row in rows.values())
    assert 0 <= report["bytes_per_rank"] * 512 / report["bytes"] - 1 < 0.002  # 512 does not divide the number of rows


def test_bytes_per_rank_are_printed(capsys):
    cuts = ["--shard", "weight=-,tp", "--mesh", "fsdp=4,tp=3,dp_replicate=2"]
    assert cli.main(["inspect", *LINEAR, *cuts]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[-4:] == ["7x100", "tp", "cuts", "1"] and lines[2].split()[-4:] == ["2", "fsdp", "cuts", "0"]
    assert lines[-1].startswith("mesh fsdp=4 x tp=3 x dp_replicate=2, 24 ranks: each holds at most 2,808 bytes")
    assert cli.main(["inspect", *LINEAR, "--mesh", "tp=3"]) == 0
    assert "axis 'tp' shards nothing" in capsys.readouterr().out


@given(st.integers(0, 1000), st.lists(st.integers(1, 9), max_size=3))
def test_a_rank_has_the_largest_chunk(size, parts):
    left = torch.empty(size)
    for count in parts:
        left = left.chunk(count)[0]
    assert mesh._largest(size, parts) == len(left)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*LINEAR, "--mesh", "fsdp"], "not AXIS=SIZE"),
        ([*LINEAR, "--mesh", "fsdp=2,fsdp=4"], "is given twice"),
        ([*LINEAR, "--shard", "weight=tp"], "pass the mesh as well"),
        ([*LINEAR, "--mesh", "tp=2", "--shard", "weight"], "not PATTERN=SPEC"),
        ([*LINEAR, "--mesh", "tp=2", "--shard", "weight=dp"], "names an axis 'dp'"),
        ([*LINEAR, "--mesh", "tp=2", "--shard", "wait=tp"], "matches no weight; names look like weight"),
        ([*LINEAR, "--mesh", "tp=2", "--shard", "bias=-,tp"], "has 2 dimensions, but bias has 1"),
        (["torch:zeros", "--arg", "size=[3]"], "only a Module's weights have names"),
    ],
)
def test_a_failure_is_a_one_line_error(capsys, arguments, said):
    assert cli.main(["inspect", *arguments]) == 1
    really = capsys.readouterr().err
    assert said in really and really.count("\n") == 1
