import json

import pytest
import torch
from safetensors.torch import load_file

from firstloss import cli

LINEAR = ["torch.nn:Linear", "--arg", "in_features=300", "--arg", "out_features=7"]


def test_weights_of_a_target_are_written(tmp_path, capsys):
    assert cli.main(["init", *LINEAR, "-o", str(tmp_path / "out"), "--seed", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == 4 * (300 * 7 + 7)
    torch.manual_seed(5)
    eager = torch.nn.Linear(300, 7)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in eager.state_dict().items())


def test_the_summary_is_printed(tmp_path, capsys):
    assert cli.main(["init", *LINEAR, "-o", str(tmp_path)]) == 0
    assert "8.2 KiB in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*LINEAR, "--max-shard-size", "large"], "not a size"),
        (["torch:zeros", "--arg", "size=[3]"], "only a Module has a state dict"),
    ],
)
def test_a_failure_is_a_one_line_error(tmp_path, capsys, arguments, said):
    assert cli.main(["init", *arguments, "-o", str(tmp_path / "out")]) == 1
    said_really = capsys.readouterr().err
    assert said in said_really and said_really.count("\n") == 1
