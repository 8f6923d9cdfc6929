"""The training job of `firstloss demo`: a Llama on the source of Python's standard library, as bytes.

`train` is the example to copy; the rest feeds it and reports to the parent process. The jobs are
- `firstloss`: the constructor captured, the first loss computed as soon as the weights are available, and the step
  compiled in the background;
- `pytorch`: plain PyTorch, without Firstloss.
Each runs in its own process, so that neither profits from imports or caches of the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import firstloss as fl
from firstloss import timeline

JOBS = ("firstloss", "pytorch")
SIZES = {
    "500m": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 11,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "100m": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 9,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def train(config: LlamaConfig, batches: list[torch.Tensor], artifacts: str) -> Iterator[float]:
    """Train a Llama with Firstloss, from its constructor on; yields each step's loss."""
    backend = fl.backend("XLA", artifact_dir=artifacts)

    torch.manual_seed(0)
    with backend.device:
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(batch):
        loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for batch in batches:
        loss = step(batch)  # asynchronous: the value is fetched when it is read
        yield loss.item()


def train_plainly(config: LlamaConfig, batches: list[torch.Tensor]) -> Iterator[float]:
    """Train the same with plain PyTorch; yields each step's loss as soon as it is there, before the backward pass."""
    torch.manual_seed(0)
    with timeline.span("construct"):
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for number, batch in enumerate(batches):
        with timeline.span("first step") if number == 0 else contextlib.nullcontext():
            loss = model(input_ids=batch, labels=batch).loss
        yield loss.item()
        with timeline.span(timeline.REST) if number == 0 else contextlib.nullcontext():
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def standard_library(limit: int = 4 << 20) -> bytes:
    """The first `limit` bytes of the standard library's Python source, with files in sorted order."""
    root = sysconfig.get_paths()["stdlib"]
    text = bytearray()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "__pycache__"})
        for name in sorted(files):
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as file:
                    text += file.read()
                if len(text) >= limit:
                    return bytes(text[:limit])
    if not text:
        raise FileNotFoundError(f"no Python source under {root}; this Python installation has none")
    return bytes(text)


def make_batches(text: bytes, steps: int, size: int, length: int) -> list[torch.Tensor]:
    """`steps` batches of `size` pieces of the text, each `length` bytes long; the same in every run."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    draws = torch.Generator().manual_seed(1)  # leave the default generator to the model
    offsets = torch.randint(len(data) - length, (steps, size), generator=draws).tolist()
    return [torch.stack([data[at : at + length] for at in row]).long() for row in offsets]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=(*JOBS, "warm"))
    parser.add_argument("--size", choices=SIZES, default="500m")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--artifacts", default="artifacts")
    args = parser.parse_args()
    timeline.current().add("import", start=0.0)

    send = _message_sender()
    if args.job == "warm":  # only bring the libraries' files into the page cache
        import jax  # noqa: F401

        return
    config = LlamaConfig(vocab_size=256, max_position_embeddings=2048, **SIZES[args.size])
    batches = make_batches(standard_library(), args.steps, args.batch, args.length)
    if args.job == "pytorch":
        losses = train_plainly(config, batches)
    else:
        losses = train(config, batches, args.artifacts)
    for number, loss in enumerate(losses):
        if number > 0:
            timeline.mark(f"loss {number + 1}")
        elif timeline.current().first_loss is None:  # the XLA backend marks it itself
            timeline.mark(timeline.FIRST_LOSS)
        send(loss=loss)
    send(timeline=timeline.current().to_dict())


def _message_sender():
    """A function that sends JSON lines to the parent process; all other output to stdout goes to stderr."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(**message: Any) -> None:
        print(json.dumps(message), file=pipe, flush=True)

    return send


if __name__ == "__main__":
    try:
        main()
    except fl.errors.FirstlossError as error:
        sys.exit(f"{type(error).__name__}: {error}")
