"""The byte-level language model on eight devices, with weights and optimizer state sharded (FSDP).

    python -m examples.byte_lm_fsdp --steps 50

The devices are virtual devices on one CPU; on a machine with eight accelerators, remove the line with
jax_num_cpu_devices. Only the backend differs from `byte_lm.py`, and the losses are the same up to rounding.

Requires the extra xla.
"""

import argparse

import jax
import torch

import firstloss as fl
from examples.byte_lm import ByteLM, batches, schedule
from firstloss.trainer import Trainer, TrainingLoop


def train(out, steps, devices=8, artifacts="artifacts", width=256, layers=4, batch_size=16):
    """Train for `steps` steps on `devices` devices, and return the Trainer."""
    mesh = {"fsdp": devices} if devices > 1 else None
    trainer = Trainer(
        backend=fl.backend("XLA", mesh=mesh, artifact_dir=artifacts),
        model_dir=out,
        model=lambda: ByteLM(width, layers),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        schedulers=schedule,
        loop=TrainingLoop(max_steps=steps, clip_grad_norm=1.0),
        seed=0,
    )
    trainer.fit(batches(batch_size=batch_size))
    return trainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", default="runs/byte_lm_fsdp")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    train(args.out, args.steps)


if __name__ == "__main__":
    main()
