"""One of two processes that train one model: `python -m tests.trainer.ranks FOLDER PORT RANK STEPS`; prints JSON.

The run would take more than a hundred steps, but process 1, and only it, gets a signal at step 8.
"""

import json
import os
import signal
import sys

import jax

folder, port, rank, steps = sys.argv[1], *map(int, sys.argv[2:])
LONG = steps > 100
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)

from torch import nn  # noqa: E402

import firstloss as fl  # noqa: E402
from firstloss.trainer import Callback, Checkpoint, Logging, Trainer, TrainingLoop  # noqa: E402
from firstloss.trainer.loggers import CSVLogger, JSONLogger, ProgressLogger, TensorBoardLogger  # noqa: E402

from .small import adamw, decay, loader  # noqa: E402


class Wide(nn.Module):
    """Wide enough to be sharded: weights with fewer than 4,096 elements are replicated."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 4))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)


class Recorder(Callback):
    """Records this process's results, and sends the signal."""

    def __init__(self):
        self.losses, self.saved = [], []

    def on_metrics(self, trainer, metrics, step):
        self.losses += [metrics["loss"]] if "loss" in metrics else []

    def on_save_end(self, trainer, path):
        self.saved.append(trainer.state.step)

    def on_step_end(self, trainer):
        if LONG and rank == 1 and trainer.state.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer, error):
        print(json.dumps({"stopped": trainer.state.step, "saved": self.saved}), flush=True)


recorder = Recorder()
every = None if LONG else 2
trainer = Trainer(
    backend=fl.backend("XLA", mesh={"fsdp": 4}, artifact_dir=f"{folder}/artifacts"),
    model_dir=f"{folder}/run",
    model=Wide,
    optimizer=adamw,
    schedulers=decay,
    loop=TrainingLoop(max_steps=steps, eval_every_steps=every, clip_grad_norm=1.0),
    checkpoint=Checkpoint(steps=every, keep_last=2, best=None if LONG else "val_loss"),
    logging=Logging(log_steps=5 if LONG else 1),
    callbacks=[recorder],
    loggers=[ProgressLogger(), JSONLogger(), CSVLogger(), TensorBoardLogger()],
    seed=0,
)
data = loader()
if LONG:
    trainer.fit(data)
val = loader(count=8, shuffle=False)
trainer.fit(data, val)
weight = trainer.model.layers[2].weight
try:
    weight.detach().clone()
except fl.errors.ShardingError:
    print(
        json.dumps(
            {"losses": recorder.losses, "saved": recorder.saved, "last": trainer.validate(val, ckpt_path="last")}
        )
    )
