"""The training job of `firstloss demo`: a Llama-style model on the source of Python's standard library, as bytes.

`train` is the example to copy; the rest feeds it and tells the parent process what happened. The same job runs
- `firstloss`: the constructor captured, the first loss computed as soon as the weights are available, and the step
  compiled behind it;
- `pytorch`: plain PyTorch, without Firstloss.
Each in a process of its own, so that neither finds imports or caches that the other has warmed.
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

WAYS = ("firstloss", "pytorch")
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
    """Train a Llama from its constructor on, with Firstloss; yields each step's loss."""
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
    """The same in plain PyTorch; yields each step's loss."""
    torch.manual_seed(0)
    with timeline.span("construct"):
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for number, batch in enumerate(batches):
        with timeline.span("first step") if number == 0 else contextlib.nullcontext():
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def standard_library(limit: int = 4 << 20) -> bytes:
    """The first `limit` bytes of the standard library's Python source, its files in sorted order."""
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
        raise FileNotFoundError(f"no Python source under {root}: this Python came without it")
    return bytes(text)


def make_batches(text: bytes, steps: int, size: int, length: int) -> list[torch.Tensor]:
    """`steps` batches of `size` pieces of the text, `length` bytes each, the same on every run."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    draws = torch.Generator().manual_seed(1)  # its own: the model's stream stays as the user would find it
    offsets = torch.randint(len(data) - length, (steps, size), generator=draws).tolist()
    return [torch.stack([data[at : at + length] for at in row]).long() for row in offsets]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=(*WAYS, "warm"))
    parser.add_argument("--size", choices=SIZES, default="500m")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--artifacts", default="artifacts")
    args = parser.parse_args()
    timeline.current().add("import", start=0.0)

    say = _speaker()
    if args.way == "warm":  # brings the libraries' files into memory, and is done
        import jax  # noqa: F401

        return
    config = LlamaConfig(vocab_size=256, max_position_embeddings=2048, **SIZES[args.size])
    batches = make_batches(standard_library(), args.steps, args.batch, args.length)
    if args.way == "pytorch":
        losses = train_plainly(config, batches)
    else:
        losses = train(config, batches, args.artifacts)
    for number, loss in enumerate(losses):
        if number == 0 and timeline.current().first_loss is None:  # the backend marks its own
            timeline.mark(timeline.FIRST_LOSS)
        say(loss=loss)
    say(timeline=timeline.current().to_dict())


def _speaker():
    """A function that sends one JSON object per line to the parent; all else that is printed goes to stderr."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        print(json.dumps(what), file=pipe, flush=True)

    return say


if __name__ == "__main__":
    try:
        main()
    except fl.errors.FirstlossError as error:
        sys.exit(f"{type(error).__name__}: {error}")
