"""The same run on any mesh (`same_run=8`): its bits, and its steps against those that XLA divides.

A Llama (8 layers, hidden 256, with dropout) and a ResNet-18 train 50 steps with AdamW on meshes of 1 to 8 virtual
devices of one CPU, in float32 and in bfloat16; the losses and a digest of all weights after them are compared bit for
bit. Without dropout, the Llama's step is timed beside the plain one of the same mesh. Peak memory is the process's,
from before the first step, so weights and optimizer state count.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import tempfile
import time

from benchmarks import harness, models

NAME = "the same run on any mesh: a Llama (8 layers, hidden 256) and a ResNet-18 with AdamW, 50 steps, same_run=8"
GOAL = "0 bits differ; a step takes 1.15 times the plain one's on 8 devices, 1.5 on one; 1.1 of its memory"
MESHES = {
    "one device": {"fsdp": 1},
    "fsdp 2": {"fsdp": 2},
    "fsdp 4": {"fsdp": 4},
    "fsdp 8": {"fsdp": 8},
    "dp 2 x fsdp 4": {"dp": 2, "fsdp": 4},
    "fsdp 4 x tp 2": {"fsdp": 4, "tp": 2},
}
FIELDS = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_STEPS, _TIMED = 50, 5


def child(side, args):
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    import torch

    import firstloss as fl

    name, which, kind = side.split(", ")
    make, loss_of, batches = SIDES[which](args.tiny, 3 if args.tiny else _STEPS)
    same_run = None if kind == "plain" else 8
    with tempfile.TemporaryDirectory() as artifacts:
        backend = fl.backend("XLA", artifact_dir=artifacts, mesh=MESHES[name], same_run=same_run, first_loss="compiled")
        torch.manual_seed(0)
        with backend.device:
            model = make()
            if kind == "bfloat16":
                model = model.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        compiled = fl.compile(model, backend)

        @fl.trace
        def step(batch):
            loss = loss_of(compiled, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        before = harness.settled()
        harness.reset_peak()
        begin = time.perf_counter()
        losses = [step(batches[0]).item()]
        first, timed = time.perf_counter() - begin, []
        for batch in batches[1 : _TIMED + 1] if kind == "plain" else batches[1:]:
            begin = time.perf_counter()
            losses.append(step(batch).item())
            timed.append(time.perf_counter() - begin)
        peak = harness.peak() - before
        digest = hashlib.sha256()
        for weight in model.state_dict().values():
            content = fl.materialize_tensor(weight).detach().contiguous().reshape(-1)
            digest.update(content.view(torch.uint8).numpy().tobytes())
    seconds = sorted(timed)[len(timed) // 2]
    bits = [loss.hex() for loss in losses]
    return {"first": first, "seconds": seconds, "peak": peak, "losses": bits, "digest": digest.hexdigest()}


def _llama(tiny, steps, dropout=0.0):
    import torch

    models.import_llama()
    fields = {**(models.LLAMA_TINY if tiny else FIELDS), "attention_dropout": dropout}
    generator = torch.Generator().manual_seed(1)
    shape = (16, 32 if tiny else 128)
    batches = [torch.randint(fields["vocab_size"], shape, generator=generator) for _ in range(steps)]
    return (lambda: models.llama(**fields)), (lambda call, batch: call(input_ids=batch, labels=batch).loss), batches


def _resnet(tiny, steps):
    import torch

    generator = torch.Generator().manual_seed(1)
    size = 16 if tiny else 32
    batches = [
        (torch.randn(16, 3, size, size, generator=generator), torch.randint(10, (16,), generator=generator))
        for _ in range(steps)
    ]

    def loss_of(call, batch):
        images, labels = batch
        logits = call(images.to(next(call.parameters()).dtype)).logits
        return torch.nn.functional.cross_entropy(logits.float(), labels)

    return models.resnet18, loss_of, batches


SIDES = {"Llama": functools.partial(_llama, dropout=0.1), "ResNet-18": _resnet, "Llama without dropout": _llama}


def measure(args):
    exact = [
        (name, which, dtype) for which in ("Llama", "ResNet-18") for dtype in ("float32", "bfloat16") for name in MESHES
    ]
    runs = {side: harness.in_child("same_run", ", ".join(side), args) for side in exact}
    timed = harness.interleaved(
        [
            f"{name}, Llama without dropout, {kind}"
            for name in ("one device", "fsdp 8")
            for kind in ("plain", "float32")
        ],
        args.rounds,
        lambda side: harness.in_child("same_run", side, args),
    )
    rows, data = [], {}
    different = 0
    for side in exact:
        name, which, dtype = side
        mine, of_one = runs[side], runs["one device", which, dtype]
        differ = sum(a != b for a, b in zip(mine["losses"], of_one["losses"], strict=True))
        same = mine["digest"] == of_one["digest"]
        different += differ + (not same)
        rows.append((", ".join(side), f"{differ} losses differ; weights {'the same' if same else 'DIFFER'}"))
        data[", ".join(side)] = {"losses": differ, "weights": same, "seconds": mine["seconds"]}
    met = different == 0
    for name, most in (("one device", 1.5), ("fsdp 8", 1.15)):
        mine, plain = (timed[f"{name}, Llama without dropout, {kind}"] for kind in ("float32", "plain"))
        time_ratio = harness.ratio(mine, plain, "seconds")
        memory = harness.ratio(mine, plain, "peak")
        data[name] = {"time": time_ratio, "memory": memory}
        rows.append(
            (
                f"{name}, a step",
                f"{harness.middle(mine, 'seconds'):.3f} s, plain {harness.middle(plain, 'seconds'):.3f} s: "
                f"{time_ratio:.2f} of it; memory {memory:.2f}",
            )
        )
        met = met and time_ratio <= most and memory <= 1.1
    return harness.Figure(NAME, GOAL, rows, met, data)


if __name__ == "__main__":
    harness.main(sys.modules[__name__])
