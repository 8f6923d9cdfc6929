"""The examples, shortened, on real data."""

import json
import os
import sys

import pytest

from firstloss.cli import main
from tests import forked


def test_the_digits_example_learns(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    from examples import digits

    monkeypatch.chdir(tmp_path)
    assert digits.main(["--epochs", "6", "--out", str(tmp_path / "run")])["val_accuracy"] > 0.97


def test_the_byte_model_learns_from_its_file(tmp_path, capsys):
    """From uniform bytes (8 bits) to below 5 in thirty steps of a small model."""
    small = ["--trainer.model.init_args.width=64", "--trainer.model.init_args.layers=2"]
    short = ["--trainer.loop.max_steps=30", "--trainer.loop.validation.max_batches=2"]
    folders = [f"--trainer.model_dir={tmp_path / 'run'}", f"--trainer.artifact_dir={tmp_path / 'artifacts'}"]
    arguments = ["--trainer.optimizer.init_args.lr=0.003", "--train_dataloader.init_args.batch_size=4"]
    assert main(["fit", "examples/byte_lm.yaml", *small, *short, *folders, *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 30
    assert main(["validate", str(tmp_path / "run" / "config.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val_bits_per_byte"] < 5.5


def test_a_hugging_face_folder_is_fine_tuned(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    import torch

    from examples import finetune_hf

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "start")
    assert main(["init", str(tmp_path / "start" / "config.json"), "-o", str(tmp_path / "start"), "--json"]) == 0
    start = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "start").state_dict()
    monkeypatch.chdir(tmp_path)
    trainer = finetune_hf.main([str(tmp_path / "start"), "--steps", "1", "--out", str(tmp_path / "run")])
    now = trainer.model.state_dict()
    # One AdamW step with this rate moves no weight further, so training began from the folder's weights.
    for name, tensor in start.items():
        assert 0 < (now[name].clone() - tensor).abs().max() <= 3.1e-4, name
    assert not torch.equal(now["lm_head.weight"].clone(), start["lm_head.weight"])


SHARDED = """
import sys, jax
jax.config.update("jax_num_cpu_devices", 8)
from examples import byte_lm_fsdp
for devices in (8, 1):
    trainer = byte_lm_fsdp.train(f"run{devices}", 3, devices, width=64, layers=1, batch_size=8)
    weight = trainer.model.blocks[0].up.weight
    print(float(weight.clone().abs().sum()), trainer.state.step)
"""


def test_eight_devices_train_as_one(tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join([root, os.path.join(root, "src")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = forked.run(["-c", SHARDED], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    (eight, steps), (one, _) = (line.split() for line in done.stdout.splitlines())
    assert steps == "3"
    # Each mesh sums in another order, and AdamW magnifies small gradients.
    assert float(eight) == pytest.approx(float(one), rel=1e-5)
    losses = [json.loads((tmp_path / f"run{n}" / "metrics.jsonl").read_text().splitlines()[0])["loss"] for n in (8, 1)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # as above, before any update


@pytest.fixture(autouse=True)
def modules_of_the_examples():
    yield
    for name in [name for name in sys.modules if name.startswith("examples.")]:
        del sys.modules[name]
