"""Weights on a GPU: which fills are trusted there, how long they take, and whose bits they have."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.llama import CONFIGS, Llama


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], rounds: int = 3) -> tuple[float, float, Any]:
    """Of the first call, and the median of the calls after it; and what the last one has returned."""
    found, result = [], None
    for _ in range(rounds + 1):
        result = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        wait()
        began = time.perf_counter()
        result = call()
        wait()
        found.append(time.perf_counter() - began)
    return found[0], statistics.median(found[1:]), result


_MIX = 0x1E3779B97F4A7C15


def hash_of(tensor: torch.Tensor, first: int = 0, into: int = 0) -> int:
    """A sum over elements of what mixes an element's bits with its number: shards' sums add up to the whole's."""
    flat = tensor.detach().reshape(-1)
    flat = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize])
    for begin in range(0, flat.numel(), 1 << 24):
        bits = flat[begin : begin + (1 << 24)].to(torch.int64)
        index = torch.arange(first + begin, first + begin + bits.numel(), device=bits.device)
        mixed = (bits + 1) * _MIX + index * 0x2545F4914F6CDD1D
        mixed = (mixed ^ (mixed >> 29)) * 0x3C79AC492BA7B653
        into = (into + int((mixed ^ (mixed >> 31)).sum())) & ((1 << 64) - 1)
    return into


def hash_of_all(tensors: dict[str, torch.Tensor]) -> str:
    total = 0
    for n, tensor in enumerate(tensors.values()):
        total = hash_of(tensor, n << 40, total)
    return f"{total:016x}"


def bandwidth(size: int) -> float:
    """Bytes a second that the device writes."""
    memory = torch.empty(size, dtype=torch.uint8, device=device())
    _, median, _ = seconds(lambda: memory.fill_(1), 5)
    return size / median


class Counted:
    """How many weights kernels of ours have made, of how many that were asked for."""

    def __enter__(self) -> Counted:
        from firstloss.gpu import weights

        self.made = self.asked = 0
        self._module, self._make = weights, weights.materialize

        def make(values: Any, *args: Any, **kwargs: Any) -> Any:
            values = list(values)
            found = self._make(values, *args, **kwargs)
            self.made, self.asked = len(found), len(values)
            return found

        weights.materialize = make
        return self

    def __exit__(self, *exception: Any) -> None:
        self._module.make = self._make


def probe(tiny: bool) -> dict[str, Any]:
    """Which kernels this device and this PyTorch are found alike with."""
    if not torch.cuda.is_available():
        from firstloss.gpu import probe as tried

        kinds = [(n, d) for n in ("uniform", "normal") for d in (torch.float32, torch.bfloat16, torch.float16)]
        return {
            "alike": {f"cpu {n} {d}": tried.cpu_type_is_supported(n, d) for n, d in kinds},
            "refused": {},
            "ok": True,
        }
    from firstloss.gpu import probe as tried

    index = torch.cuda.current_device()
    found: dict[str, Any] = {}
    began = time.perf_counter()
    for name in ("uniform", "normal"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            found[f"cpu {name} {dtype}"] = tried.cpu_bits(index, name, dtype)
            found[f"cuda {name} {dtype}"] = tried.cuda_layout_of(index, name, dtype)
    needed = [f"{where} {name} torch.float32" for where in ("cpu", "cuda") for name in ("uniform", "normal")]
    return {
        "alike": found,
        "refused": dict(tried.refused),
        "seconds": time.perf_counter() - began,
        "ok": all(found[name] for name in needed),
    }


def _ours_on_cuda(config: Any, captures: list[float]) -> nn.Module:
    import firstloss as fl

    began = time.perf_counter()
    torch.manual_seed(0)
    with fl.deferred(), device():
        model = Llama(config)
    captures.append(time.perf_counter() - began)
    return fl.materialize_module(model)


class Shard(nn.Module):
    """Rank 3's eighth of each weight, along its first dimension, as FSDP2 cuts it."""

    def __init__(self, config: Any, rank: int, of: int) -> None:
        super().__init__()
        whole = Llama(config)
        for n, (_, weight) in enumerate(whole.named_parameters()):
            part = -(-weight.shape[0] // of)
            self.register_buffer(f"w{n}", weight.detach()[rank * part : (rank + 1) * part].clone())


def _eighth(config: Any, captures: list[float]) -> nn.Module:
    import firstloss as fl

    began = time.perf_counter()
    torch.manual_seed(0)
    with fl.deferred(), device():
        module = Shard(config, 3, 8)
    captures.append(time.perf_counter() - began)
    return fl.materialize_module(module)


def _eager(config: Any) -> nn.Module:
    torch.manual_seed(0)
    with device():
        return Llama(config)


def _meta(config: Any) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama(config)
    model.to_empty(device=device())
    model.init_weights()
    return model


def construct(tiny: bool, dtype: torch.dtype) -> dict[str, Any]:
    """A Llama constructed for the GPU: eager, meta and to_empty, ours; and an eighth of it."""
    config = CONFIGS["tiny" if tiny else "8B"]
    torch.set_default_dtype(dtype)
    rounds = 2
    first, eager, model = seconds(lambda: _eager(config), rounds)
    expected = hash_of_all(dict(model.named_parameters()))
    slices = []
    for n, weight in enumerate(model.parameters()):
        part = -(-weight.shape[0] // 8)
        slices.append(hash_of(weight.detach()[3 * part : 4 * part], n << 40))
    count = sum(p.numel() for p in model.parameters())
    model = None
    _, meta, model = seconds(lambda: _meta(config), rounds)
    model = None
    captures: list[float] = []
    with Counted() as counted:
        ours_first, ours, model = seconds(lambda: _ours_on_cuda(config, captures), rounds)
    same = hash_of_all(dict(model.named_parameters())) == expected
    model = None
    of_shard: list[float] = []
    with Counted() as of_eighth:
        _, eighth, shard = seconds(lambda: _eighth(config, of_shard), rounds)
    same_eighth = [hash_of(w, n << 40) for n, w in enumerate(shard.buffers())] == slices
    captured, captured_shard = statistics.median(captures[1:]), statistics.median(of_shard[1:])
    floor = count * dtype.itemsize / bandwidth((1 << 24) if tiny else (4 << 30))
    return {
        "parameters": count,
        "eager": eager,
        "eager first": first,
        "meta, to_empty, init_weights": meta,
        "ours": ours,
        "ours first": ours_first,
        "capture": captured,
        "made in": ours - captured,
        "an eighth": eighth,
        "an eighth made in": eighth - captured_shard,
        "floor": floor,
        "same bits": same,
        "same bits of the eighth": same_eighth,
        "made by kernels": [counted.made, counted.asked],
        "made by kernels of the eighth": [of_eighth.made, of_eighth.asked],
        "ok": same and same_eighth,
    }


def cpu_bits(tiny: bool) -> dict[str, Any]:
    """A float32 Llama captured on the CPU, made on the GPU: how long, and whether its weights are the CPU's."""
    import firstloss as fl

    config = CONFIGS["tiny" if tiny else "8B"]

    def capture() -> nn.Module:
        torch.manual_seed(0)
        return fl.deferred_init(Llama, config)

    times, captures = [], []
    with Counted() as counted:
        for _ in range(4):
            model = None
            began = time.perf_counter()
            model = capture()
            captures.append(time.perf_counter() - began)
            wait()
            began = time.perf_counter()
            fl.materialize_module(model, device=device())
            wait()
            times.append(time.perf_counter() - began)
    # A weight in the middle and the last one, as eager PyTorch's own generator makes them, from their place on.
    checked = _some_as_eager(config, model)
    return {
        "capture": statistics.median(captures),
        "first": times[0],
        "seconds": statistics.median(times[1:]),
        "made by kernels": [counted.made, counted.asked],
        "same bits": checked,
        "ok": checked,
    }


def _some_as_eager(config: Any, model: nn.Module) -> bool:
    """Of another capture some weights are made on the CPU, by PyTorch's kernels, and compared."""
    import firstloss as fl

    torch.manual_seed(0)
    on_cpu = fl.deferred_init(Llama, config)
    names = ["embedding.weight", "layers.1.mlp.up_proj.weight", "norm.weight", "head.weight"]
    for name in names:
        fl.materialize_tensor(on_cpu.get_parameter(name))
    pairs = [(on_cpu.get_parameter(name), model.get_parameter(name).cpu()) for name in names]
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def one_hash(tiny: bool) -> dict[str, Any]:
    """The hash of all weights: eager on the CPU, ours on the GPU, whole and as 2, 4 and 8 shards."""
    import firstloss as fl

    config = CONFIGS["tiny" if tiny else "1.1B"]
    torch.manual_seed(0)
    began = time.perf_counter()
    eager = Llama(config)
    found = {"eager on the CPU": hash_of_all(dict(eager.named_parameters()))}
    took = {"eager on the CPU": time.perf_counter() - began}
    sizes = [w.shape for w in eager.parameters()]
    del eager
    torch.manual_seed(0)
    model = fl.materialize_module(fl.deferred_init(Llama, config), device=device())
    found["whole on the GPU"] = hash_of_all(dict(model.named_parameters()))
    del model
    for of in (2, 4, 8):
        total = 0
        for rank in range(of):
            torch.manual_seed(0)
            shards = fl.materialize_module(fl.deferred_init(Shard, config, rank, of), device=device())
            for n, (shard, size) in enumerate(zip(shards.buffers(), sizes, strict=True)):
                row = 1
                for k in size[1:]:
                    row *= k
                total = hash_of(shard, (n << 40) + rank * -(-size[0] // of) * row, total)
        found[f"{of} shards"] = f"{total:016x}"
    return {"hashes": found, "seconds": took, "ok": len(set(found.values())) == 1}
