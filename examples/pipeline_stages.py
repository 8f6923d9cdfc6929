"""Pipeline stages with the weights of one whole model; each rank initializes only its own.

    torchrun --nproc-per-node 2 examples/pipeline_stages.py

Every rank captures the whole constructor from the same seed, which computes nothing, deletes the layers of other
stages, and materializes the rest: bit-identical to the weights of the whole model, with any number of stages.

Requires only torch (CPU and gloo).
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import firstloss as fl


class Model(nn.Module):
    """A language model of identical layers; a missing layer, or a missing first or last part, is skipped."""

    def __init__(self, width: int = 64, depth: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(vocabulary, width)
        layer = lambda: nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)  # noqa: E731
        self.layers = nn.ModuleDict({str(number): layer() for number in range(depth)})
        self.head: nn.Module | None = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens to logits, or the values passed to the next stage."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def stage_of(model: Model, stage: int, stages: int) -> Model:
    """Delete the parts of `model` that do not belong to one stage."""
    depth = len(model.layers)
    for number in range(depth):
        if number * stages // depth != stage:
            del model.layers[str(number)]
    if stage > 0:
        model.embedding = None
    if stage < stages - 1:
        model.head = None
    return model


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def construct(stage: int, stages: int) -> Model:
    """One stage, with the weights of the whole model."""
    torch.manual_seed(0)
    return fl.materialize_module(stage_of(fl.deferred_init(Model), stage, stages))


def train(steps: int, microbatches: int = 4) -> tuple[Model, list[float]]:
    """Train this rank's stage; the losses are the last stage's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = construct(rank, world)
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    means = []
    for step in range(steps):
        tokens = (torch.arange(8 * 16).reshape(8, 16) * 7 + step) % 256
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        elif rank == world - 1:
            schedule.step(target=tokens, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            means.append(torch.stack([loss.detach() for loss in losses]).mean().item())
            print(f"step {step}: loss {means[-1]:.4f}", flush=True)
    return model, means


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
