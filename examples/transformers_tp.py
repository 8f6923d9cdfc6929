"""transformers' tensor parallelism on a checkpoint: each rank initializes its shards of missing weights itself.

    torchrun --nproc-per-node 2 examples/transformers_tp.py FOLDER

FOLDER is written by `save_pretrained`, of a model with a tensor-parallel plan (Llama, Qwen, Mixtral...). Without
Firstloss, omit the line `with fl.deferred():` and unindent the one below it. Losses and weights are the same, bit for
bit.

Requires transformers and accelerate, a dependency of transformers here (CPU and gloo are enough).
"""

import argparse

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import firstloss as fl


def train(folder: str, steps: int) -> tuple[list[float], torch.nn.Module]:
    """The losses, and the model."""
    torch.manual_seed(0)  # the same on each rank, for weights missing from the checkpoint
    with fl.deferred():
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))
    fl.materialize_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # weights are DTensors, biases may not be
    losses = []
    for step in range(steps):
        tokens = (torch.arange(32, device=model.device).reshape(2, 16) * 7 + step) % model.config.vocab_size
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses, model


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    train(args.folder, args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
