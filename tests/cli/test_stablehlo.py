"""`firstloss stablehlo`: the module runs in a process without the model and without PyTorch."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from firstloss.cli import main

RUN = """
import sys, numpy, firstloss as fl
arrays = fl.run_stablehlo(sys.argv[1])
assert "torch" not in sys.modules
numpy.savez(sys.argv[2], **arrays)
"""


def test_a_written_module_runs_without_the_model(tmp_path, capsys):
    module, out = tmp_path / "weights.mlir", tmp_path / "weights.npz"
    target = ["torch.nn:Linear", "--arg", "in_features=48", "--arg", "out_features=32"]
    assert main(["stablehlo", *target, "-o", str(module), "--seed", "7", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == module.stat().st_size and report["plan"]["compile_units"] == 2
    subprocess.run([sys.executable, "-c", RUN, str(module), str(out)], check=True)
    torch.manual_seed(7)
    eager = nn.Linear(48, 32)
    with np.load(out) as arrays:
        for name, tensor in eager.state_dict().items():
            assert arrays[name].tobytes() == tensor.numpy().tobytes()


def test_a_mesh_and_specs_are_printed(tmp_path, capsys):
    module = tmp_path / "weights.mlir"
    target = ["torch.nn:Linear", "--arg", "in_features=48", "--arg", "out_features=32"]
    specs = ["--mesh", "data=2,tp=4", "--shard", "weight=data+tp,-", "--shard", "bias=tp"]
    assert main(["stablehlo", *target, "-o", str(module), *specs]) == 0
    assert "8 devices (data 2 x tp 4)" in capsys.readouterr().out
    text = module.read_text()
    assert 'out_shardings=[<@mesh, [{"tp"}]>, <@mesh, [{"data", "tp"}, {}]>]' in text


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--mesh", "tp=many"], "'tp=many' is not AXIS=SIZE"),
        (["--mesh", "tp=2", "--shard", "weight"], "'weight' is not PATTERN=SPEC"),
        (["--mesh", "tp=2", "--shard", "wait=tp"], "'wait' matches no weight"),
        (["--mesh", "tp=2", "--shard", "weight=dp"], "names an axis 'dp'"),
        (["--shard", "weight=dp"], "pass the mesh as well"),
        (["--mesh", "tp=2,tp=4"], "--mesh 'tp=2,tp=4': 'tp' is given twice"),
        (["--mesh", "tp=2", "--shard", "weight=tp,tp"], "weight: the spec (('tp',), ('tp',)) names 'tp' twice"),
        (["--mesh", "tp=2", "--shard", "weight=tp,-,-"], "has 3 dimensions, but the weight, of shape [32, 48], has 2"),
        (["--mesh", "tp=2", "--shard", "weight=tp", "--shard", "weight=-"], "--shard: 'weight' is given twice"),
    ],
)
def test_invalid_input_is_a_one_line_error_and_leaves_no_file(arguments, complaint, tmp_path, capsys):
    target = ["torch.nn:Linear", "--arg", "in_features=48", "--arg", "out_features=32"]
    assert main(["stablehlo", *target, "-o", str(tmp_path / "weights.mlir"), *arguments]) == 1
    output = capsys.readouterr().err
    assert complaint in output and output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
