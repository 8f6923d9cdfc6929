"""The Python samples of the documentation run: each page as one program, preceded by what the page assumes.

`python -m tests.test_doc_samples PAGE` runs one page. `<sample>` stands for the page's next sample, so the test fails
if a sample is added to a page and not here. The samples of `docs/index.md` are complete; `test_docs.py` runs them.
"""

import importlib.util
import json
import os
import re
import sys
import tempfile
import traceback

import pytest
import torch

from tests import forked

from .test_docs import PAGES, ROOT, read

MODEL = """
import torch
from torch import nn
import firstloss as fl

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.o_proj(self.q_proj(x))

class Model(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x, y=0.0):
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()

    def init_weights(self):
        for weight in self.parameters():
            nn.init.normal_(weight)

config = None
"""

READY = (
    MODEL
    + """
model = fl.compile(Model(), fl.backend("XLA"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batch = torch.ones(4, 8)
loader = [batch] * 3
"""
)

RANK = (
    MODEL
    + """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
device = "cpu"
"""
)

DEVICES = "import jax\njax.config.update('jax_num_cpu_devices', 8)\n"

SCRIPTS = {
    "README.md": """
import transformers

def Model():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32))

import torch
batches = list(torch.randint(32, (3, 2, 8)))
loader = [{"input_ids": batch, "labels": batch} for batch in batches]
<sample>
assert not fl.is_deferred(model)
<sample>
<sample>
assert trainer.state.step == 9
""",
    "docs/trainers.md": MODEL
    + """
with fl.deferred(preserve_rng_state=True):
    model = Model(config)
model.to_empty(device="cpu")
model.init_weights()
<sample>
assert not fl.is_deferred(model)
model = fl.deferred_init(Model)
model.lm_head = model.layers[0].q_proj
<sample>
""",
    "docs/check-init.md": MODEL
    + """
device, batch, checkpoint = "cpu", torch.ones(4, 8), Model().state_dict()
<sample>
assert model.layers[0].q_proj.weight.grad is not None
""",
    "docs/concepts.md": RANK
    + """
Llama, device, step, batch, Whole = Model, 'cpu', lambda x: model(x), torch.ones(8), Model
<sample>
Model = lambda: nn.Sequential(nn.Linear(2, 3))
torch.manual_seed(0)
eager = Model().state_dict()
torch.manual_seed(0)
<sample>
assert eager.keys() == weights.keys() and all(torch.equal(eager[name], weights[name]) for name in eager)
Model = Whole
<sample>
assert not fl.is_deferred(model)
""",
    "docs/random-policies.md": MODEL + "<sample>\nassert fl.is_deferred(model)",
    "docs/traced-steps.md": READY
    + """
import warnings
compiled = model
told = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always")
<sample>
assert [type(warning.message) for warning in told] == [fl.errors.GraphChangeWarning], [str(t.message) for t in told]
assert "(False, now True)" in str(told[0].message)
settings["squared"] = False
step(batch)
assert len(told) == 1, told
settings["scale"] = 0.5
step(batch)
assert len(told) == 1, told
shown = []
print = shown.append
<sample>
assert "(False, now True)" in str(shown.pop())
<sample>
assert len(told) == 1, told
<sample>
assert shown.pop().isfinite() and len(seen) == 1
<sample>
results = [careful(batch).item() for _ in range(3)]
assert losses == results
<sample>
for _ in range(3):
    warm(batch)
assert state.step == 3
""",
    "docs/optimizers.md": READY
    + """
<sample>
<sample>
step(batch)
assert 0 < float(optimizer.param_groups[0]["lr"]) < 1e-3
<sample>
optimizer = torch.optim.AdamW(model.parameters())
schedule = Warmup(optimizer)
schedule.step()
assert float(optimizer.param_groups[0]["lr"]) == 1e-5
<sample>
bfloat16 = step(batch).item()
fl.amp.set_half_dtype("float16")
<sample>
assert step(batch).item() != bfloat16
@fl.trace
def step(batch):
    with fl.amp.autocast():
        loss = model(batch)
<sample>
step(batch)
""",
    "docs/checkpoints.md": READY
    + """
backend = fl.backend()
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
step = 3
<sample>
schedule.last_epoch = 7
<sample>
assert state["step"] == 3 and schedule.last_epoch == 0
""",
    "docs/meshes.md": DEVICES
    + MODEL
    + """
<sample>
@fl.trace
def step(batch):
    return compiled(batch)

assert step(torch.ones(8, 8)).item() > 0
<sample>
assert backend.mesh.same_run == 8
<sample>
assert backend.mesh.devices.size == 8
""",
    "docs/plan.md": """
import jax
"""
    + MODEL
    + """
class step:  # of the backend that the sample makes
    @staticmethod
    def plan(batch):
        with fl.backend().device:
            model = Model()
        compiled = fl.compile(model)

        @fl.trace
        def traced(batch):
            loss = compiled(batch)
            loss.backward()
            return loss

        return traced.plan(batch)

batch = torch.ones(4096, 8)
<sample>
assert plan.flops > 0 and plan.peak_bytes > 0
""",
    "docs/export.md": DEVICES
    + READY
    + """
@fl.trace
def step(x):
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
import jax
import safetensors.flax
<sample>
assert "stablehlo" in text
<sample>
assert abs(float(loss) - float(results[0])) < 1e-6
traced, batches, seed = step, [(batch.numpy(),)] * 3, 0
<sample>
assert abs([traced(torch.ones(4, 8)) for _ in range(3)][-1].item() - float(results[0])) < 1e-6
<sample>
assert weights["layers.0.q_proj.weight"].addressable_shards[0].data.shape == (2, 8)
written = weights
<sample>
assert all((weights[name] == written[name]).all() for name in written)
""",
    "docs/trainer.md": MODEL
    + """
train_loader, val_loader = ([(torch.randn(4, 8), torch.randn(4, 8))] * n for n in (40, 2))
<sample>
assert trainer.state.step or trainer.state.stopped
import tests.conftest  # torchvision, which timm needs, beside a CPU build of torch
import timm
<sample>
fl.deferred_init(WithLoss)
import torchmetrics
<sample>
<sample>
trainer = Trainer(model_dir="other", model=Model, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
                  loop=TrainingLoop(max_epochs=2), callbacks=[BestSoFar()])
trainer.fit(train_loader, val_loader)
<sample>
plateau = Plateau()
trainer = Trainer(model=Model, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
                  loop=TrainingLoop(max_epochs=2), callbacks=[plateau])
trainer.fit(train_loader, val_loader)
assert plateau.state_dict()["best"] > 0
<sample>
assert len(make_optimizer(Model()).param_groups) == 2
""",
    "docs/moving.md": MODEL
    + """
<sample>
eager = model
<sample>
assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), model.parameters(), strict=True))
<sample>
assert cstorch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).defaults["eps"] == 1e-6
assert cstorch.utils.tensorboard.SummaryWriter
<sample>
import cerebras.pytorch
assert cerebras.pytorch is cstorch
""",
    "docs/reference/index.md": "<sample>\nassert nn and torch and fl.deferred",
}


def samples(page):
    return re.findall(r"^```python\n(.*?)^```", read(page), flags=re.S | re.M)


def program(page):
    """The page's samples and the code around them, as one text."""
    parts = SCRIPTS[page].split("<sample>")
    return "".join(part + sample for part, sample in zip(parts, [*samples(page), ""], strict=True))


def test_all_pages_with_samples_are_run():
    assert {page for page in [*PAGES, "README.md"] if samples(page)} == {*SCRIPTS, "docs/index.md"}


@pytest.mark.timeout(600)
def test_samples_run():
    """One process imports what they need, and forks one for each page. (One test, or every worker would import it.)"""
    done = forked.run(["-m", __name__], capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    failures = json.loads(done.stdout.splitlines()[-1])
    assert failures.keys() == SCRIPTS.keys()
    if importlib.util.find_spec("timm") is None:
        del failures["docs/trainer.md"]
    wrong = {page: text for page, text in failures.items() if text}
    if wrong:  # without this test's source, so that the report shows only what is wrong
        pytest.fail("\n\n".join(f"{page}: {text[-4000:]}" for page, text in wrong.items()), pytrace=False)


def run(page):
    """Run one page in this process, in an empty folder; returns its failure."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        path = os.path.join(folder, "page.py")  # for code that reads the user's source
        text = program(page)
        torch.manual_seed(0)  # seeded, so that training on the page converges deterministically
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            exec(compile(text, path, "exec"), {"__name__": "page", "__package__": "tests"})
        except BaseException:
            return traceback.format_exc()
        finally:
            os.chdir(os.path.dirname(folder))
    return ""


def in_fork(page):
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        with open(write_end, "w") as answer:
            answer.write(run(page))
        os._exit(0)
    os.close(write_end)
    with open(read_end) as answer:
        failure = answer.read()
    status = os.waitpid(child, 0)[1]
    return failure or (f"it ended with status {status}" if status else "")


if __name__ == "__main__":
    import gc
    import importlib

    forked.import_all()
    for name in ("transformers", "torch.distributed.fsdp", "torchmetrics"):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise each fork would copy everything
    pages = sys.argv[1:] or SCRIPTS
    out = {page: in_fork(page) for page in pages}
    print(json.dumps(out))
