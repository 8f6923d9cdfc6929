"""The training programs of nanoGPT, nanochat and torchtitan with one line changed: the same weights, bit for bit.

nanoGPT and nanochat are not packages: FIRSTLOSS_TRAINERS names a folder with checkouts of them.
"""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.integrations.one_line import changed, checkout, needs, run, run_ranks

WORDS = "the a loss first model weight step draw rank shard of in on and reads writes".split()


def texts(count):
    chosen = random.Random(0)
    return [" ".join(chosen.choice(WORDS) for _ in range(200)) for _ in range(count)]


@pytest.mark.parametrize("compiled", ["False", "True"])
def test_nanogpt(tmp_path, compiled):
    folder = tmp_path / "nanoGPT"
    shutil.copytree(checkout("nanoGPT"), folder, ignore=shutil.ignore_patterns(".git"))
    (folder / "data" / "mine").mkdir()
    for split in ("train", "val"):
        np.random.RandomState(0).randint(0, 65, 5000).astype(np.uint16).tofile(
            folder / "data" / "mine" / f"{split}.bin"
        )
    source = (folder / "train.py").read_text()
    (folder / "one_line.py").write_text(
        changed(source, "model = GPT(gptconf)", "model = fl.deferred_init(GPT, gptconf)")
    )
    small = "n_layer=2 n_head=2 n_embd=32 block_size=16 batch_size=2 gradient_accumulation_steps=2 dropout=0.1".split()
    short = "dataset=mine device=cpu max_iters=4 eval_iters=1 eval_interval=4 log_interval=1".split()
    checkpoints = []
    for script in ("train.py", "one_line.py"):
        run([script, *(f"--{a}" for a in [*small, *short, f"compile={compiled}", f"out_dir={script}.out"])], folder)
        checkpoints.append(torch.load(folder / f"{script}.out" / "ckpt.pt", weights_only=False))
    same(checkpoints[0]["model"], checkpoints[1]["model"])
    assert checkpoints[0]["best_val_loss"] == checkpoints[1]["best_val_loss"]


def same(expected, actual):
    assert expected.keys() == actual.keys()
    for name, weight in expected.items():
        assert torch.equal(weight, actual[name]), name


NANOCHAT_DATA = """
import json, os, sys, torch, pyarrow, pyarrow.parquet
from nanochat.tokenizer import RustBPETokenizer
base, texts = os.environ["NANOCHAT_BASE_DIR"], json.load(sys.stdin)
os.makedirs(base + "/base_data_climbmix")
for number in range(2):
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, f"{base}/base_data_climbmix/shard_{number:05d}.parquet", row_group_size=100)
tokenizer = RustBPETokenizer.train_from_iterator(iter(texts), 320)
tokenizer.save(base + "/tokenizer")
torch.save(torch.ones(tokenizer.get_vocab_size(), dtype=torch.int32), base + "/tokenizer/token_bytes.pt")
"""


def test_nanochat(tmp_path):
    folder = tmp_path / "nanochat"
    shutil.copytree(checkout("nanochat"), folder, ignore=shutil.ignore_patterns(".git"))
    needs("rustbpe", "tiktoken", "wandb", "pyarrow")
    base = {"NANOCHAT_BASE_DIR": str(tmp_path / "base"), "WANDB_MODE": "disabled", "TORCHDYNAMO_DISABLE": "1"}
    environment = {**os.environ, **base, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    subprocess.run(
        [sys.executable, "-c", NANOCHAT_DATA], input=json.dumps(texts(300)), text=True, check=True, env=environment
    )
    source = (folder / "scripts" / "base_train.py").read_text()
    new = "with fl.deferred(preserve_rng_state=True):"
    (folder / "scripts" / "one_line.py").write_text(changed(source, 'with torch.device("meta"):', new))
    small = "depth=2 head-dim=32 max-seq-len=32 device-batch-size=2 total-batch-size=64 eval-tokens=64".split()
    short = "device-type=cpu num-iterations=3 eval-every=-1 core-metric-every=-1 sample-every=-1".split()
    for script in ("base_train", "one_line"):
        arguments = [f"--{a}" for a in [*small, *short, f"model-tag={script}"]]
        run(["-m", f"scripts.{script}", *arguments], folder, **base)
    expected, actual = (
        torch.load(tmp_path / "base" / "base_checkpoints" / script / "model_000003.pt")
        for script in ("base_train", "one_line")
    )
    same(expected, actual)


# torchtitan requires an accelerator, and its attention has no backward pass on a CPU: replaced by PyTorch's own
# attention with the same mask.
TORCHTITAN = """
import hashlib, importlib, os, sys, types, torch
import torchtitan.tools.utils as utils
from tests.integrations.one_line import changed
cpu = types.ModuleType("cpu")
cpu.__dict__.update(torch.cpu.__dict__)
cpu.get_device_name = lambda *a: "cpu"
cpu.get_device_properties = lambda *a: types.SimpleNamespace(total_memory=1 << 34)
cpu.memory_stats = lambda *a: {}
for name in "reset_peak_memory_stats empty_cache set_device synchronize memory_allocated".split():
    setattr(cpu, name, lambda *a, **k: 0)
utils.device_type, utils.device_module = "cpu", cpu
import torch.distributed.fsdp, torchtitan.distributed.utils
torchtitan.distributed.utils.set_pg_timeouts = lambda **more: None  # by a barrier among devices
from torch.nn.attention.flex_attention import create_mask
from torchtitan.models.common.attention import FlexAttention
def attend(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
    assert score_mod is None and not return_aux.lse
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None
FlexAttention._compiled_flex_attn = staticmethod(attend)
import torchtitan.trainer as module
one_line, family, name, folder = sys.argv[1] == "one line", *sys.argv[2:]
if one_line:
    source = open(module.__file__).read()
    source = changed(source, 'torch.device("meta"),', "fl.deferred(preserve_rng_state=True),")
    exec(compile(source, module.__file__, "exec"), module.__dict__)
config = getattr(importlib.import_module(f"torchtitan.models.{family}.config_registry"), name)()
config.hf_assets_path, config.dataloader.dataset_path, config.dump_folder = folder, folder + "/text", folder + "/out"
config.training.seq_len, config.training.local_batch_size, config.training.global_batch_size = 64, 2, -1
config.parallelism.spmd_backend = "partial_dtensor"
config.validator.enable = config.checkpoint.enable = False
config.debug.seed, config.training.steps, config.metrics.log_freq = 7, 3, 1
trainer = config.build()
model = trainer.model_parts[0]
sharded = [module for module in model.modules() if isinstance(module, torch.distributed.fsdp.FSDPModule)]
for module in sharded:
    module.set_force_sum_reduction_for_comms(True)  # gloo can do nothing else
if one_line:
    import firstloss as fl
    assert fl.is_deferred(model)
tokens = torch.arange(128).reshape(2, 64) * 7 % 300
batch = {"input": tokens, "positions": torch.arange(64).expand(2, 64)}
inputs, _, extra = trainer.post_dataloading_process(batch, tokens)
whole = lambda t: (t.detach().full_tensor() if hasattr(t, "full_tensor") else t.detach()).clone()
def state():
    for module in sharded:
        module.reshard()  # else what a forward pass has gathered, in bfloat16
    return {name: whole(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
digest = lambda t: hashlib.sha256(t.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
digests = lambda tensors: {name: digest(t) for name, t in tensors.items()}
first, name = f"{folder}/as it is-1.pt", f"{folder}/{sys.argv[1]}-{os.environ['WORLD_SIZE']}.pt"
with torch.no_grad():
    if os.path.exists(first) and not one_line:  # as it is, it has other weights on each mesh: start from the same
        from torch.distributed.tensor import distribute_tensor
        for weight, value in zip(model.parameters(), torch.load(first)["first"].values()):
            weight.copy_(distribute_tensor(value, weight.device_mesh, weight.placements))
    output = whole(model(inputs, **extra))
before, losses = state(), []
results = {"weights": digests(before), "output": digest(output)}
if not one_line and os.environ["WORLD_SIZE"] == "1":
    results["first"] = before
trainer.metrics_processor.log = lambda step, loss, *more, **others: losses.append(torch.tensor(loss))
trainer.train()
assert len(losses) == 3
results |= {"losses": torch.stack(losses), "trained": digests(state())}
if os.environ["RANK"] == "0":
    torch.save(results, name)
torch.distributed.barrier()
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "family, name",
    [("llama3", "llama3_debugmodel"), ("qwen3", "qwen3_moe_debug"), ("deepseek_v3", "deepseek_v3_debugmodel")],
)
def test_torchtitan(tmp_path, family, name):
    """Two ranks have the weights and the first output of one process, and train three steps from them.

    Unmodified, torchtitan has different weights on each mesh: two ranks are given those of one process.
    """
    needs("torchtitan", "triton", "tokenizers", "datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"])
    tokenizer.train_from_iterator(texts(50), special)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (tmp_path / "text").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(50))
    (tmp_path / "text" / "data.json").write_text(lines)
    runs = {}
    for world, how in itertools.product((1, 2), ("as it is", "one line")):
        run_ranks(TORCHTITAN, world, how, family, name, str(tmp_path))
        runs[world, how] = torch.load(tmp_path / f"{how}-{world}.pt")
    for world in (1, 2):
        plain, deferred = runs[world, "as it is"], runs[world, "one line"]
        for what in ("weights", "output", "trained"):
            assert plain[what] == deferred[what], (what, world)
        assert torch.equal(plain["losses"], deferred["losses"]) and len(set(deferred["losses"].tolist())) == 3
    for what in ("weights", "output"):
        assert runs[1, "as it is"][what] == runs[2, "one line"][what], what
