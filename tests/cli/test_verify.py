"""How verify compares: by name, bits and ties."""

import json
import re

import pytest
import torch

from firstloss import cli
from firstloss.cli.verify import compare, named_tensors
from tests import forked


def model(tied=True):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    if tied:
        module[1].weight = module[0].weight
    return module


def test_names_cover_ties_buffers_and_containers():
    names = [name for name, _ in named_tensors(model())]
    assert "0.weight" in names and "1.weight" in names and "2.num_batches_tracked" in names
    result = model()
    result[0].table = torch.zeros(2)
    assert "0.table" in dict(named_tensors(result))
    result = {"a": [torch.zeros(1), model()], "b": 3}
    names = [name for name, _ in named_tensors(result)]
    assert names[0] == "['a'][0]" and "['a'][1].0.weight" in names


def test_the_same_model_twice_is_identical():
    assert compare(dict(named_tensors(model())), dict(named_tensors(model()))) == {}


def test_one_bit_is_a_difference_and_equal_nans_are_not():
    a, b = model(), model()
    with torch.no_grad():
        a[0].bias[0] = b[0].bias[0] = float("nan")
        a[0].bias[1] = 0.0
        b[0].bias[1] = -0.0
    assert compare(dict(named_tensors(a)), dict(named_tensors(b))) == {"0.bias": "1 of 3 elements differ"}


def test_shape_dtype_and_requires_grad_are_compared():
    a = {"x": torch.zeros(2), "y": torch.zeros(2), "z": torch.zeros(2)}
    b = {"x": torch.zeros(3), "y": torch.zeros(2, dtype=torch.float64), "z": torch.zeros(2, requires_grad=True)}
    differences = compare(a, b)
    assert differences["x"] == "shape is torch.Size([3]), but torch.Size([2]) in the eager model"
    assert differences["y"] == "dtype is torch.float64, but torch.float32 in the eager model"
    assert differences["z"] == "requires_grad is True, but False in the eager model"


def test_missing_and_extra_tensors_are_reported():
    differences = compare({"a": torch.zeros(1)}, {"b": torch.zeros(1)})
    assert differences == {"a": "is missing from the deferred model", "b": "is in the deferred model only"}


def test_a_lost_tie_is_a_difference():
    a, b = dict(named_tensors(model())), dict(named_tensors(model()))
    b["1.weight"] = b["0.weight"].clone().requires_grad_()
    assert list(compare(a, b)) == ["1.weight"]


def verify_mesh(*options, target="tests.cli.pair_target:Pair"):
    batch = ["--batch", "source=8x16:int64", "--batch", "target=8x16:int64"]
    return forked.run(["-m", "firstloss", "verify", target, *batch, *options], capture_output=True)


@pytest.mark.timeout(300)
def test_a_step_is_the_same_run_on_two_meshes():
    done = verify_mesh("--mesh", "fsdp=8", "--same-run", "8", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["identical"] and result["meshes"] == ["fsdp=8", "fsdp=1"] and result["first_operation"] is None
    assert result["losses"][0] == result["losses"][1] and len(result["losses"][0]) == 3


@pytest.mark.timeout(300)
def test_the_first_operation_that_differs_between_two_meshes_is_named():
    done = verify_mesh("--mesh", "fsdp=8", "--steps", "1")
    assert done.returncode == 1
    assert re.search(
        r"weights differ after 1 steps. The first operation that differs, in step 1, is aten\.\w+.* at .*\.py:\d+: "
        r"[\d,]+ of [\d,]+ elements, by \d\.\de-\d\d at most. With --same-run 8",
        done.stderr,
    ), done.stderr


@pytest.mark.parametrize(
    "options, message",
    [
        (["--mesh", "fsdp=8"], "--mesh compares training steps, which take a batch. Pass for example --batch 16x128"),
        (["--mesh", "a=1", "--mesh", "b=1", "--mesh", "c=1", "--batch", "8x4"], "--mesh is given 3 times"),
    ],
)
def test_what_two_meshes_need_is_said(options, message, capsys):
    assert cli.main(["verify", "torch.nn:Linear", "--arg", "in_features=4", "--arg", "out_features=4", *options]) == 1
    assert message in capsys.readouterr().err
