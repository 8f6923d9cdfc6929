import json
import math
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

from firstloss import cli

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


class Perceptron(nn.Module):
    def __init__(self, width=64, out=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, out)

    def forward(self, x, scale=None):
        x = self.down(torch.relu(self.up(x)))
        return x if scale is None else x * scale


PERCEPTRON = ["plan", f"{__name__}:Perceptron"]


@pytest.fixture
def llama(config_json):
    return config_json(LLAMA)


def plan(capsys, *arguments):
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_is_printed(capsys):
    assert cli.main([*PERCEPTRON, "--mesh", "fsdp=8", "--batch", "32x64", "--memory", "1MiB"]) == 0
    out = capsys.readouterr().out
    assert "mesh fsdp=8, 8 devices; on each of them, per step:" in out
    assert "it fits in 1.0 MiB" in out and "all-gather" in out
    assert "smaller than 4,096 elements" in " ".join(out.split())
    assert "nothing was allocated, compiled or run" in out


def test_json_has_the_numbers(capsys):
    arguments = ["--mesh", "fsdp=8", "--batch", "32x64", "--flops", "1T", "--link", "2GB/s", "--memory", "10kB"]
    report = plan(capsys, *PERCEPTRON, *arguments)
    weights = {row["name"]: row for row in report["arrays"] if row["role"] == "weights"}
    assert {name: row["bytes"] for name, row in weights.items()} == {
        "up.weight": 64 * 256 * 4 // 8,
        "up.bias": 256 * 4,
        "down.weight": 8 * 256 * 4,
        "down.bias": 8 * 4,
    }
    assert weights["up.weight"]["cut"] == [["fsdp"], []] and weights["up.weight"]["why"] == ""
    assert report["fits"] is False and report["memory"] == 10_000
    assert report["bytes"]["peak"] == sum(report["bytes"]["at_peak"].values())
    sent = sum(row["sent"] for row in report["sent"])
    assert report["seconds"]["links"] == {"fsdp": sent / 2e9}
    assert report["seconds"]["compute"] == report["flops"] / 1e12
    assert report["seconds"]["memory"] == 0


def test_memory_bandwidth_is_counted(capsys):
    arguments = ["--mesh", "fsdp=8", "--batch", "32x64", "--flops", "1T", "--link", "2GB/s"]
    without = plan(capsys, *PERCEPTRON, *arguments)
    report = plan(capsys, *PERCEPTRON, *arguments, "--hbm", "1GB/s")
    assert report["seconds"]["memory"] == report["memory_bytes"] / 1e9
    assert report["seconds"]["links"] == without["seconds"]["links"]
    assert report["seconds"]["apart"] > without["seconds"]["apart"] + report["seconds"]["memory"] / 2
    assert cli.main([*PERCEPTRON, *arguments, "--hbm", "1GB/s"]) == 0
    assert "for operations" in capsys.readouterr().out


def test_arguments_are_passed_by_name_with_another_optimizer(capsys):
    arguments = ["--mesh", "dp=4", "--batch", "x=8x64", "--batch", "scale=8x1", "--optimizer", "SGD"]
    report = plan(capsys, *PERCEPTRON, *arguments)
    assert report["bytes"]["batch"] == 4 * (2 * 64 + 2) and report["bytes"]["state"] == 0


def test_the_models_own_tp_plan_is_used(llama, capsys):
    report = plan(capsys, "plan", llama, "--mesh", "fsdp=4,tp=2", "--batch", "16x32")
    rows = {row["name"]: row for row in report["arrays"]}
    assert rows["model.layers.0.self_attn.q_proj.weight"]["cut"] == [["tp"], ["fsdp"]]
    assert rows["model.layers.0.self_attn.o_proj.weight"]["cut"] == [["fsdp"], ["tp"]]
    assert rows["model.layers.3.mlp.down_proj.weight.exp_avg"]["bytes"] == 128 * 384 * 4 // 8
    assert {("all-reduce", ("tp",)), ("reduce-scatter", ("fsdp",))} <= {
        (row["kind"], tuple(row["axes"])) for row in report["sent"]
    }


def test_shardings_can_be_given(capsys):
    arguments = ["--mesh", "fsdp=4,tp=2", "--batch", "32x64", "--shard", "up.*=tp", "--shard", "down.weight=-,tp"]
    report = plan(capsys, *PERCEPTRON, *arguments)
    rows = {row["name"]: row for row in report["arrays"]}
    assert rows["up.weight"]["cut"] == [["tp"], []] and rows["down.weight"]["cut"] == [[], ["tp"]]
    assert rows["up.weight"]["why"] == "its spec does not name fsdp"


def test_recomputation_saves_memory_and_costs_operations(llama, capsys):
    arguments = ["plan", llama, "--mesh", "fsdp=4", "--batch", "16x512", "--arg", "num_hidden_layers=12"]
    kept, again = plan(capsys, *arguments), plan(capsys, *arguments, "--recompute")
    assert again["bytes"]["at_peak"]["activations"] < kept["bytes"]["at_peak"]["activations"] / 4
    assert 1.2 < again["flops"] / kept["flops"] < 4 / 3 + 0.05


def test_a_picture_is_drawn(tmp_path, llama, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    arguments = ["plan", llama, "--mesh", "fsdp=8", "--batch", "16x32", "--picture", str(path)]
    assert cli.main([*arguments, "--flops", "1T", "--link", "1GB/s", "--memory", "1GiB"]) == 0
    root = ElementTree.fromstring(path.read_text())
    assert root.tag.endswith("svg")
    before = path.read_bytes()
    assert cli.main([*arguments]) == 0 and path.read_bytes() != before


@pytest.mark.parametrize(
    "arguments, error",
    [
        (
            ["--mesh", "fsdp=8", "--batch", "33x64"],
            "33 rows cannot be split evenly over the 8 devices of fsdp=8. Write 40x64",
        ),
        (["--mesh", "fsdp=8", "--batch", "32by64"], "write a shape such as 512x8192"),
        (["--mesh", "fsdp=8", "--batch", "y=32x64"], "the model's forward takes x, scale"),
        (["--mesh", "fsdp=8", "--batch", "32x64:float99"], "torch has no dtype 'float99'"),
        (["--mesh", "fsdp", "--batch", "32x64"], "is not AXIS=SIZE; write for example --mesh fsdp=64,tp=8"),
        (["--mesh", "fsdp=4,pp=2", "--batch", "32x64"], "nothing is sharded over 'pp'. Data axes are batch, data"),
        (["--mesh", "fsdp=4,tp=2", "--batch", "32x64"], "--shard '*.up.weight=tp,-'"),
        (
            ["--mesh", "fsdp=4,tp=3", "--batch", "32x64", "--shard", "up.weight=tp,-"],
            "shards dimension 0 of up.weight, of shape 256x64, over tp=3: 3 does not divide 256. Use a mesh on which "
            "that is 2",
        ),
        (
            ["--mesh", "fsdp=4", "--batch", "32x64", "--shard", "up.weight=tp,-"],
            "names an axis 'tp'; the mesh has fsdp",
        ),
        (["--mesh", "fsdp=4", "--batch", "32x64", "--shard", "no.*=fsdp"], "matches no weight; names look like up."),
        (["--mesh", "fsdp=4", "--batch", "32x64", "--shard", "up.bias=-,fsdp"], "has 2 dimensions, but up.bias has 1"),
        (
            ["--mesh", "fsdp=4", "--batch", "32x64", "--optimizer", "Adagio"],
            "torch.optim has no optimizer of this name",
        ),
        (["--mesh", "fsdp=4", "--batch", "32x64", "--recompute"], "has no gradient_checkpointing_enable()"),
        (
            ["--mesh", "fsdp=4", "--batch", "32x64", "--memory", "much"],
            "is not a quantity. Write for example --memory 80",
        ),
        (["--mesh", "fsdp=4", "--batch", "32x64", "--flops", "0"], "is not a quantity. Write for example --flops 989T"),
        (["--mesh", "fsdp=4", "--batch", "32x64", "--hbm", "0"], "is not a quantity. Write for example --hbm 3.35TB/s"),
        (["--mesh", "fsdp=4", "--batch", "32x64", "--hbm", "3TB/s"], "needs --flops and --link, too"),
        (["--mesh", "fsdp=4", "--batch", "32x64", "--link", "tp=1GB/s"], "names an axis 'tp'; the mesh has fsdp"),
        (["--mesh", "dp=2,fsdp=4", "--batch", "32x64", "--link", "dp=1GB/s"], "has no rate for 'fsdp'"),
        (["--mesh", "fsdp=4", "--batch", "32x64", "--picture", "plan.png"], "the picture is an SVG file"),
        (["--mesh", "fsdp=4", "--batch", "32x65"], "with --batch 32x65 the step raises RuntimeError"),
    ],
)
def test_a_step_that_does_not_fit_is_reported(arguments, error, capsys):
    assert cli.main([*PERCEPTRON, *arguments]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("firstloss plan: ") and error in err


def test_a_target_that_is_not_a_module_is_an_error(capsys):
    assert cli.main(["plan", "builtins:dict", "--mesh", "fsdp=2", "--batch", "2x2"]) == 1
    assert "only a Module can be trained" in capsys.readouterr().err


def test_405_billion_parameters_can_be_planned_on_4096_devices(llama_405b, capsys):
    arguments = ["--mesh", "fsdp=512,tp=8", "--batch", "512x8192", "--recompute", "--memory", "80GiB"]
    report = plan(capsys, "plan", llama_405b(torch_dtype="bfloat16"), *arguments)
    assert report["devices"] == 4096 and report["fits"] is True
    parameters = 2 * 128256 * 16384 + 126 * (16384 * (2 * 16384 + 2 * 1024 + 3 * 53248) + 2 * 16384) + 16384
    norms = (2 * 126 + 1) * 16384
    weights = sum(row["bytes"] for row in report["arrays"] if row["role"] == "weights" and "rotary" not in row["name"])
    # The norms are sharded over fsdp only; 2 bytes per element.
    assert weights == 2 * (parameters - norms) // 4096 + 2 * norms // 512
    # A forward pass takes two operations per parameter and token, here computed twice, and a backward pass four.
    # Exceptions: the embedding is a lookup, and the head and the last product of each layer, whose result the backward
    # pass does not need, are not recomputed.
    tokens, embedding = 512 * 8192 // 4096, 128256 * 16384
    products = tokens * (8 * (parameters - norms - 2 * embedding) + 6 * embedding - 2 * 126 * 16384 * 53248)
    # Attention computes scores and their weighted sum: forward, recomputed, twice that in the backward pass, plus the
    # scores once more.
    attention = 126 * tokens * 4 * 8192 * 16384 * 4.5
    assert report["matmul_flops"] == products + attention
    layers = [part for part in report["parts"] if part["turns"] > 1]
    assert sum(part["turns"] * part["layers"] for part in layers) == 2 * 126
    assert all(math.isfinite(part["flops"]) for part in layers)
