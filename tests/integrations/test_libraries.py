"""Trainers of libraries with one line for Firstloss train bit-identically."""

import contextlib
import itertools
import json
import warnings

import pytest
import torch
from torch import nn

import firstloss as fl
from tests import tiny_llama
from tests.integrations import example_ranks
from tests.integrations.one_line import needs, run, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::firstloss.errors.NotMaterializedWarning")


def eagerly(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def seeded(construct, *args):
    torch.manual_seed(0)
    return construct(*args)


def same(expected, actual):
    """Compare losses, and weights by name."""
    assert expected[0] == actual[0] and len(actual[0]) > 0
    assert expected[1].keys() == actual[1].keys()
    for name, weight in expected[1].items():
        assert torch.equal(weight, actual[1][name]), name


def llama(**fields):
    import transformers

    transformers.logging.set_verbosity_error()
    return tiny_llama.config(**fields)


ROWS = [{name: torch.arange(i, i + 8) for name in ("input_ids", "labels")} for i in range(16)]


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["model", "model_init"])
def test_transformers_trainer(tmp_path, how):
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    def train(construct):
        options = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 2}
        arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, **options)
        if how == "model":
            trainer = Trainer(seeded(construct, LlamaForCausalLM, llama()), arguments, train_dataset=ROWS)
        else:
            trainer = Trainer(
                None, arguments, train_dataset=ROWS, model_init=lambda: construct(LlamaForCausalLM, llama())
            )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model.state_dict()

    same(train(eagerly), train(fl.deferred_init))


# -- accelerate --------------------------------------------------------------------------------------------------------


def test_accelerate_prepare():
    needs("accelerate")
    from accelerate import Accelerator
    from transformers import LlamaForCausalLM

    def train(construct):
        accelerator = Accelerator(cpu=True)
        model = seeded(construct, LlamaForCausalLM, llama())
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for row in ROWS[:3]:
            loss = model(**{name: tensor[None] for name, tensor in row.items()}).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, accelerator.get_state_dict(model)

    same(train(eagerly), train(fl.deferred_init))


def test_accelerate_load_checkpoint_and_dispatch(tmp_path):
    needs("accelerate")
    import accelerate
    from transformers import LlamaForCausalLM

    seeded(LlamaForCausalLM, llama()).save_pretrained(tmp_path)

    def load(context):
        with context():
            model = LlamaForCausalLM(llama())
        model = accelerate.load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu"})
        return [model(**{name: tensor[None] for name, tensor in ROWS[0].items()}).loss.item()], model.state_dict()

    same(load(accelerate.init_empty_weights), load(fl.deferred))


def tied():
    model = nn.ModuleDict({name: nn.Linear(160, 160) for name in ("a", "b", "c", "alone")})
    model.b.weight = model.c.weight = model.a.weight
    return model


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("inside", [False, True], ids=["after the block", "in the block"])
@pytest.mark.parametrize("names", [names for n in range(4) for names in itertools.combinations("abc", n)], ids="".join)
def test_accelerate_keeps_tied_weights(tmp_path, names, inside, kind):
    """The checkpoint has some of a tensor's names, or none; the safetensors files are not read in the block."""
    needs("accelerate")
    import accelerate
    import safetensors.torch

    saved = {f"{name}.weight": torch.full((160, 160), 3.0) for name in names}
    saved["alone.bias"] = torch.full((160,), 5.0)
    if kind == "bin":
        torch.save(saved, tmp_path / "model.bin")
    else:
        safetensors.torch.save_file(saved, tmp_path / "model.safetensors", {"format": "pt"})
    expected = seeded(tied)
    expected.load_state_dict(saved, strict=False)
    load = lambda model: accelerate.load_checkpoint_and_dispatch(  # noqa: E731
        model, str(tmp_path / f"model.{kind}"), device_map={"": "cpu"}
    )
    if inside:
        model = seeded(fl.deferred_init, lambda: load(tied()))
    else:
        model = load(seeded(fl.deferred_init, tied))
    assert model.a.weight is model.b.weight is model.c.weight
    fl.materialize_module(model)
    for name, weight in expected.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_moving_weights_to_meta_during_a_capture_is_an_error():
    needs("accelerate")
    import accelerate

    with pytest.raises(fl.errors.CaptureError, match=r"moved to the meta device .* firstloss.deferred replaces it"):
        with fl.deferred(), accelerate.init_empty_weights():
            nn.Linear(3, 3)


# -- Lightning ---------------------------------------------------------------------------------------------------------


def layers():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1))


def lightning_module(make, configure):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.losses = []
            self.model = None if configure else make()

        def configure_model(self):
            if self.model is None:
                self.model = make()

        def training_step(self, batch):
            loss = self.model(batch[0]).pow(2).mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def fit(context, make, configure):
    import lightning

    lightning.seed_everything(0, verbose=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=4, enable_model_summary=False, **quiet)
    with context(trainer):
        module = lightning_module(make, configure)
    torch.manual_seed(3)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 8)), batch_size=8)
    trainer.fit(module, data)
    return module.losses, module.state_dict()


@contextlib.contextmanager
def deferred_init_module(trainer):
    with fl.deferred(), trainer.init_module():
        yield


LIGHTNING = {
    "configure_model": (
        (lambda trainer: contextlib.nullcontext(), layers, True),
        (lambda trainer: contextlib.nullcontext(), lambda: fl.deferred_init(layers), True),
    ),
    "around the constructor": (
        (lambda trainer: contextlib.nullcontext(), layers, False),
        (lambda trainer: fl.deferred(), layers, False),
    ),
    "init_module": (
        (lambda trainer: trainer.init_module(), layers, False),
        (deferred_init_module, layers, False),
    ),
}


@pytest.mark.parametrize("plain, deferred", LIGHTNING.values(), ids=LIGHTNING)
def test_lightning(plain, deferred):
    needs("lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(fit(*plain), fit(*deferred))


# -- several processes -------------------------------------------------------------------------------------------------

RANKS = """
import contextlib, os, sys, warnings, torch, torch.distributed as dist, firstloss as fl
import tests.conftest  # torchvision, which torchmetrics imports, beside a CPU build of torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
warnings.simplefilter("ignore")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def build():
    return nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 30))
def whole(state):
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone() for k, v in state.items()}
def shard(model, **options):
    for layer in (model[1], model[4]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)
def loop(model, optimizer, backward=lambda loss: loss.backward()):
    losses = []
    for i in range(3):
        tokens = (torch.arange(8) * 3 + i + rank) % 30
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
def by_hand(construct):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    model = construct(build)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        model = shard(model, mesh=mesh)
    elif kind == "mixed precision":
        model = shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    elif kind == "cpu offload":
        model = shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return loop(model, torch.optim.AdamW(model.parameters(), lr=0.01)), whole(model.state_dict())
def lightning(construct):
    import lightning as L
    from lightning.pytorch.strategies import ModelParallelStrategy
    losses = []
    class Module(L.LightningModule):
        def configure_model(self):
            if not hasattr(self, "model"):
                self.model = shard(construct(build), mesh=self.device_mesh["data_parallel"])
        def training_step(self, batch):
            loss = nn.functional.cross_entropy(self.model(batch), batch)
            losses.append(loss.item())
            return loss
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    from lightning.fabric.plugins.environments import LightningEnvironment
    trainer = L.Trainer(accelerator="cpu", devices=world, strategy=strategy, max_steps=3, use_distributed_sampler=False,
                        **quiet)
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader((torch.arange(64) * 7) % 30, batch_size=8))
    return losses, whole(module.state_dict())
for kind in sys.argv[1:]:
    results = []
    for construct in (lambda fn: fn(), fl.deferred_init):
        torch.manual_seed(0)
        results.append((lightning if kind == "lightning" else by_hand)(construct))
    (losses, weights), (deferred_losses, deferred_weights) = results
    assert losses == deferred_losses and len(deferred_losses) == 3, (kind, losses, deferred_losses)
    assert all(torch.equal(weights[name], deferred_weights[name]) for name in weights), kind
if dist.is_initialized():
    dist.destroy_process_group()
"""


def test_two_ranks():
    run_ranks(RANKS, 2, "ddp", "fsdp2", "mixed precision", "cpu offload")


def test_lightning_on_two_ranks():
    needs("lightning")
    run_ranks(RANKS, 2, "lightning")


# -- the examples, on two ranks ----------------------------------------------------------------------------------------

EXAMPLE = "import sys; from tests.integrations import example_ranks; example_ranks.main(*sys.argv[1:])"


def test_accelerate_fsdp2():
    needs("accelerate")
    run_ranks(EXAMPLE, 2, "fsdp2", "ddp", *example_ranks.FSDP2)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch cannot gather the strided shards that this takes")
def test_transformers_tensor_parallel(tmp_path):
    needs("accelerate")  # transformers needs it
    from transformers import LlamaForCausalLM, LlamaModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

    large = {"hidden_size": 128, "intermediate_size": 256}  # tensors read only when they are used
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    models = {
        "plain": (LlamaForCausalLM, llama(**large)),
        "tied": (LlamaForCausalLM, llama(**large, tie_word_embeddings=True)),
        "without a head": (LlamaModel, llama(**large, architectures=["LlamaForCausalLM"])),
        "experts": (
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig(
                **large, **experts, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=300
            ),
        ),
    }
    for name, (model, config) in models.items():
        seeded(model, config).save_pretrained(tmp_path / name)
    folders = [str(tmp_path / name) for name in models]
    run_ranks(EXAMPLE, 2, "tensor parallel", *folders, "distribute", str(tmp_path / "without a head"))


# -- TRL ---------------------------------------------------------------------------------------------------------------

SFT = """
import json, sys
import tests.conftest
import torch, transformers
from datasets import Dataset
from tokenizers import Tokenizer, models
from trl import SFTConfig, SFTTrainer
from tests.integrations.test_libraries import llama
how, folder = sys.argv[1:]
words = Tokenizer(models.WordLevel({"<pad>": 0, **{f"w{n}": n for n in range(1, 64)}}, "<pad>"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="w1")
rows = Dataset.from_dict({"input_ids": [list(range(1 + n, 9 + n)) for n in range(32)]}).to_iterable_dataset()
options = {}
if how == "adapter":
    from peft import LoraConfig
    options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
trainer = SFTTrainer(
    folder if how == "path" else transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    SFTConfig(
        folder + "/out", use_cpu=True, bf16=False, max_steps=4, per_device_train_batch_size=4, logging_steps=1,
        report_to=[], save_strategy="no", dataset_kwargs={"skip_prepare_dataset": True}, learning_rate=1e-3,
    ),
    train_dataset=rows, processing_class=tokenizer, **options,
)
deferred = "firstloss" in sys.modules and sys.modules["firstloss"].is_deferred(trainer.model)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
weights = {name: p.detach().double().sum().item() for name, p in trainer.model.named_parameters()}
print(json.dumps({"deferred": deferred, "losses": losses, "weights": weights}))
"""


@pytest.mark.parametrize("how", ["path", "model", "adapter"])
def test_trl_by_firstloss_run(tmp_path, how):
    needs("trl", "datasets", "peft", "accelerate")
    from transformers import LlamaForCausalLM

    seeded(LlamaForCausalLM, llama()).save_pretrained(tmp_path)
    (tmp_path / "sft.py").write_text(SFT)
    found = []
    for by in ((), ("-m", "firstloss", "run")):
        printed = run([*by, str(tmp_path / "sft.py"), how, str(tmp_path)])
        found.append(json.loads(next(line for line in printed.splitlines() if line.startswith('{"deferred"'))))
    plain, deferred = found
    assert not plain.pop("deferred") and deferred.pop("deferred")
    assert plain == deferred and len(plain["losses"]) == 4


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------

ZERO = """
import os, sys, torch, warnings
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed, firstloss as fl
from torch import nn
warnings.simplefilter("ignore")
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # compiled at first use, and needed for speed alone
deepspeed.init_distributed("gloo")
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
def build():
    return nn.Sequential(nn.Linear(8, 33), nn.LayerNorm(33), nn.Linear(33, 8), nn.PReLU())
def plain():
    with deepspeed.zero.Init(config_dict_or_path=config):
        return build()
def handed_over():
    model = fl.deferred_init(build)
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    return model
results = []
for construct in (plain, handed_over, lambda: fl.deferred_init(build)):
    torch.manual_seed(0)
    model = construct()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(1, 8)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    results.append(losses)
assert results[0] == results[1] == results[2] and len(results[0]) == 3, results

# Each rank computes its own parts, of what is the same on all.
from firstloss.engine import cpu_engine
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
materialize_values, whole = cpu_engine.materialize_values, []
def counted(values, *args, **options):
    values = list(values)
    whole.extend(value.numel for value in values if value.numel)
    return materialize_values(values, *args, **options)
cpu_engine.materialize_values = counted
warnings.simplefilter("error", fl.errors.NotMaterializedWarning)
for seed in (0, rank):
    torch.manual_seed(0)
    expected = [p.detach().flatten() for p in build().parameters()]
    torch.manual_seed(seed)
    model = fl.deferred_init(build)
    try:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    except fl.errors.NotMaterializedWarning as warning:
        assert ranks > 1 and "seeds" in str(warning), warning
        continue
    for p, full in zip(model.parameters(), expected):
        size = p.ds_tensor.numel()
        mine = full[rank * size : (rank + 1) * size]
        assert type(p) is nn.Parameter and size == -(-full.numel() // ranks)
        assert torch.equal(p.ds_tensor[: mine.numel()], mine)
    assert ranks == 1 or max(whole, default=0) < 16, whole  # PyTorch draws fewer than 16 numbers one after another
for order in ("inside", "outside"):
    try:
        first, second = deepspeed.zero.Init(config_dict_or_path=config), fl.deferred()
        with first if order == "inside" else second:
            with second if order == "inside" else first:
                build()
    except fl.errors.CaptureError as error:
        assert "deepspeed.zero.Init(module=model" in str(error), error
    else:
        raise AssertionError(order)
"""


def test_deepspeed_zero_3():
    needs("deepspeed")
    run_ranks(ZERO, 1)
    run_ranks(ZERO, 2)
