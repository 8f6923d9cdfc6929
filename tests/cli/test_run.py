"""`firstloss run`: scripts as they are."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests import forked, tiny_llama

# tests.conftest: torchvision, which transformers imports, beside a CPU build of torch.
HEAD = """
import json, os, sys, warnings
import tests.conftest
import torch
warnings.simplefilter("error", RuntimeWarning)
"""

LOADS = {
    "the class": "transformers.LlamaForCausalLM.from_pretrained(folder)",
    "AutoModel": "transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)",
    "a new head": "transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)",
    "from_config": "transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))",
    "ms-swift": "as_ms_swift_does(transformers.AutoModelForCausalLM, folder)",
}

SCRIPT = (
    HEAD
    + """
import transformers

def as_ms_swift_does(auto_class, *args):
    original = transformers.PreTrainedModel.from_pretrained.__func__
    def from_pretrained(cls, *args, **kwargs):
        return original(cls, *args, **kwargs)
    transformers.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    try:
        return auto_class.from_pretrained(*args)
    finally:
        transformers.PreTrainedModel.from_pretrained = classmethod(original)

folder = sys.argv[1]
torch.manual_seed(0)
model = LOAD
deferred = "firstloss" in sys.modules and sys.modules["firstloss"].is_deferred(model)
loss = model(torch.arange(8)[None]).logits.float().square().mean()
loss.backward()
total = sum(int(p.detach().contiguous().view(-1).view(torch.uint8).long().sum()) for p in model.parameters())
print(json.dumps({"deferred": deferred, "loss": loss.item(), "bytes": total, "draw": torch.rand(1).item()}))
"""
)


def start(tmp_path, text, *arguments, by=("-m", "firstloss", "run")):
    (tmp_path / "train.py").write_text(text)
    return forked.run([*by, str(tmp_path / "train.py"), *arguments], capture_output=True, jax=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    tiny_llama.llama().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("load", LOADS)
def test_what_transformers_loads_is_deferred(load, checkpoint, tmp_path):
    text = SCRIPT.replace("LOAD", LOADS[load])
    plain = start(tmp_path, text, str(checkpoint), by=())
    deferred = start(tmp_path, text, str(checkpoint))
    assert plain.returncode == deferred.returncode == 0, plain.stderr + deferred.stderr
    before, after = (json.loads(done.stdout.splitlines()[-1]) for done in (plain, deferred))
    assert not before.pop("deferred") and after.pop("deferred")
    assert before == after
    assert "NotMaterializedWarning" not in deferred.stderr


def test_a_script_sees_what_python_shows_it(tmp_path):
    text = """
import sys, __main__
print(__name__, sys.argv[1:], __file__ == sys.argv[0] == __main__.__file__, sys.path[0] == __file__.rpartition("/")[0])
sys.exit(7)
"""
    plain, run = (start(tmp_path, text, "-x", "--json", "--", "1", by=by) for by in ((), ("-m", "firstloss", "run")))
    assert plain.stdout == run.stdout and plain.returncode == run.returncode == 7
    assert run.stdout.startswith("__main__ ['-x', '--json', '--', '1'] True True")


def test_a_module_is_run_as_by_python(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "__init__.py").write_text("")
    (tmp_path / "training" / "job.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    outputs = [
        forked.run([*by, "-m", "training.job", "a"], cwd=tmp_path, capture_output=True, jax=False)
        for by in ((), ("-m", "firstloss", "run"))
    ]
    assert outputs[0].stdout == outputs[1].stdout == "__main__ training ['a']\n", outputs[1].stderr


def test_an_exception_has_the_traceback_of_the_script(tmp_path):
    run = start(tmp_path, "def train():\n    raise ValueError('no data')\n\n\ntrain()\n")
    assert run.returncode == 1
    lines = run.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "ValueError: no data"
    assert "train.py" in lines[1] and "firstloss" not in lines[1] and "runpy" not in run.stderr


def test_what_is_no_script_is_a_one_line_error(tmp_path):
    run = forked.run(["-m", "firstloss", "run", str(tmp_path / "nothing.py")], capture_output=True, jax=False)
    assert run.returncode == 1 and run.stderr.count("\n") == 1 and "to run a module: firstloss run -m" in run.stderr


ACCELERATE = (
    HEAD
    + """
import accelerate, firstloss, transformers
os.environ["ACCELERATE_USE_FSDP"] = "true"  # as the Accelerator sets it
before = firstloss.is_deferred(transformers.LlamaForCausalLM.from_pretrained(sys.argv[1]))
plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
after = firstloss.is_deferred(transformers.LlamaForCausalLM.from_pretrained(sys.argv[1]))
print(before, after, plugin.cpu_ram_efficient_loading, os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"])
"""
)


def test_each_rank_of_fsdp2_loads_for_itself(checkpoint, tmp_path):
    """With FSDP's first version, the default, which flattens whole weights, nothing changes."""
    pytest.importorskip("accelerate")
    run = start(tmp_path, ACCELERATE, str(checkpoint))
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == "False True False False", run.stderr


# As accelerate's users write it, and what makes it use FSDP2 on a CPU.
TWO_RANKS = (
    HEAD
    + """
import accelerate, firstloss, transformers
from tests.integrations.example_ranks import take_fsdp_on_a_cpu, whole
take_fsdp_on_a_cpu()
plugin = accelerate.FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    cpu_ram_efficient_loading=True,
)
accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1])
deferred = firstloss.is_deferred(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
losses = []
for step in range(3):
    tokens = torch.arange(32).reshape(2, 16) + step + accelerator.process_index
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
total = {name: weight.double().sum().item() for name, weight in whole(model).items()}
if accelerator.is_main_process:
    print(json.dumps({"deferred": deferred, "losses": losses, "sums": total}))
accelerator.end_training()
sys.stdout.flush()
os._exit(0)  # else gloo's threads abort a rank now and then while the process ends, in the plain run too
"""
)


def test_two_ranks_of_accelerate_train_as_without_it(checkpoint, tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(TWO_RANKS)
    found = []
    for by in ((), ("-m", "firstloss", "run")):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *by, tmp_path / "train.py"]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            list(map(str, [sys.executable, *command, checkpoint])), env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))
    plain, deferred = found
    assert not plain.pop("deferred") and deferred.pop("deferred")
    assert plain == deferred
