"""Record Firstloss's results for models: Programs, recipes, weights, StableHLO, each as a named text.

    python -m tests.replay.record OUT.json.gz [--size tiny|some|all] [--only REGEX]

It uses only public names, so that it runs on any version of `src`: `python -m tests.replay` compares two of them. Names
of our files and classes are removed from the texts, and so are source lines.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import inspect
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

Texts = dict[str, str]

_LLAMA = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Constructors of the zoos that are always recorded, and how many of them the default size includes.
CONSTRUCTORS = {
    "transformers": (
        "gpt2 bert t5 mixtral mamba vit wav2vec2 whisper clip deepseek_v3 swin deberta-v2 xlnet detr blip rt_detr rwkv "
        "qwen2_moe bart gpt_neox albert opt phi3 gemma2 convnextv2 mpt bloom siglip falcon"
    ).split(),
    "torchvision": "resnet18 efficientnet_b0 shufflenet_v2_x0_5 mnasnet0_5 mobilenet_v3_small squeezenet1_1".split(),
    "timm": "test_vit test_nfnet test_mambaout test_resnet test_convnext test_byobnet test_efficientnet".split(),
}
_SOME = {"transformers": 12, "torchvision": 3, "timm": 3}
# Steps by their names in `tests.lower.model_cases`.
STEPS = {
    "transformers": ["gpt2", "bert", "t5", "mixtral", "vit", "mamba2", "whisper"],
    "torchvision": ["squeezenet1_1", "resnet18"],
    "timm": ["vit_tiny_patch16_224"],
}
_SOME_STEPS = {"transformers": 4, "torchvision": 1, "timm": 0}
_FUZZED = {"tiny": 4, "some": 60, "all": 1000}


class Odd(nn.Module):
    """Initialization that is rare in the zoos: each kind of recipe that the engines handle separately."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(96, 384)
        self.half = nn.Linear(33, 70, dtype=torch.bfloat16)
        self.embedding = nn.Embedding(130, 48, padding_idx=3)
        self.tied = nn.Linear(48, 130, bias=False)
        self.tied.weight = self.embedding.weight
        self.recurrent = nn.LSTM(16, 16, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.attention = nn.MultiheadAttention(32, 4)
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(200, 90), std=1.0, a=-1.5, b=2.0))
        self.wide = nn.Parameter(nn.init.trunc_normal_(torch.empty(64, 64), std=0.02))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(24, 24)))
        self.erf = nn.Parameter(torch.empty(70, 1000).uniform_(-0.9, 0.9).erfinv_().mul_(0.02).add_(1.0).clamp_(-1, 2))
        self.chain = nn.Parameter(torch.empty(70_000).normal_().mul_(0.5).add_(0.1).clamp_(-1, 1))
        self.transposed = nn.Parameter(torch.empty(40, 60).t().normal_())
        self.part = nn.Parameter(torch.randn(256, 64)[64:128].clone())
        self.column = nn.Parameter(torch.randn(256, 64)[:, 16:32].clone())
        self.joined = nn.Parameter(torch.cat([torch.randn(16, 8), torch.zeros(16, 8)]))
        self.register_buffer("position", torch.arange(20).float() * 0.5, persistent=False)
        self.register_buffer("chances", torch.empty(100).bernoulli_(0.3))
        self.register_buffer("whole", torch.randint(0, 9, (50,)))
        self.register_buffer("precise", torch.randn(40, dtype=torch.float64))
        self.register_buffer("few", torch.randn(7))
        with torch.no_grad():
            self.linear.weight[10:20].mul_(2.0)
            self.linear.bias.zero_()[5:9].fill_(1.0)
            self.attention.in_proj_weight[:32].normal_()


def strip_sources(text: str) -> str:
    """A Program's text without the source lines of its operations."""
    return re.sub(r"^ *# [^\n]*:\d+\n|  # [^\n]*:\d+$", "", text, flags=re.MULTILINE)


def strip_names(text: str) -> str:
    """A module's text with its functions numbered in order of appearance."""
    names: dict[str, str] = {}
    text = re.sub(r" loc\([^\n]*\)$|^#loc.*\n?", "", text, flags=re.MULTILINE)
    return re.sub(r'@(\w+|"[^"]*")', lambda match: names.setdefault(match[0], f"@{len(names)}"), text)


def digest(tensor: torch.Tensor) -> str:
    """A tensor's metadata and the hash of its bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(flat).hexdigest()[:16]}"


def of_constructor(build: Callable[[], Any], policy: str = "eager", device_parts: bool = False) -> Iterator:
    """(name, text) pairs of one constructor."""
    import firstloss as fl
    from tests.capture.eager_comparison import seed_all, tensors_of

    seed_all(0)
    with fl.deferred(rng=policy):
        module = build()
    yield "generator", hashlib.sha256(torch.get_rng_state().numpy()).hexdigest()
    try:
        program = fl.init_program(module)
    except fl.errors.NothingDeferredError:
        return
    yield "program", strip_sources(str(program))
    yield "recipes", re.sub(r"Ref\(.*?\)(?=\))", "a tensor", str(program.report()))  # contains an address
    if device_parts:
        yield from _of_shards(program, module)
    fl.materialize_module(module)
    yield "weights", "\n".join(f"{name}: {_told(tensor)}" for name, tensor in tensors_of(module))


def _told(tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return f"{tensor.layout} {tensor.dtype} {list(tensor.shape)}"
    return digest(tensor.resolve_conj().resolve_neg())


def _of_shards(program: Any, module: nn.Module) -> Iterator[tuple[str, str]]:
    import firstloss as fl

    mesh = {"fsdp": 2, "tp": 2}
    for name, where in (("whole", None), ("sharded", mesh)):
        try:
            yield f"stablehlo.{name}", strip_names(program.to_stablehlo(where))
        except fl.errors.LoweringError as error:
            yield f"stablehlo.{name}", type(error).__name__
    for where in (None, {"fsdp": 4}, mesh):
        arrays = program.run(where)
        parts = [
            f"{name} {part.index}: {hashlib.sha256(np.asarray(part.data).tobytes()).hexdigest()[:16]}"
            for name, array in arrays.items()
            for part in sorted(array.addressable_shards, key=lambda part: part.device.id)
        ]
        yield f"shards.{'' if where is None else len(where)}", "\n".join(parts)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(fl.errors.SaveError):
            fl.save_initialized(module, folder, max_shard_size="200KB")
        lines = []
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), "rb") as file:
                lines.append(f"{name} {hashlib.sha256(file.read()).hexdigest()[:16]}")
        yield "saved", "\n".join(lines)


@contextlib.contextmanager
def lowered_modules() -> Iterator[list[str]]:
    """The text of each module compiled in the block."""
    import jax

    texts: list[str] = []
    original = jax.stages.Lowered.compile

    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        texts.append(strip_names(self.as_text()))
        return original(self, *args, **kwargs)

    jax.stages.Lowered.compile = compile
    try:
        yield texts
    finally:
        jax.stages.Lowered.compile = original


def of_step(build: Callable[[], Any], make_batch: Callable[[Any], Any], loss_of: Callable[[Any], Any]) -> Iterator:
    """(name, text) pairs of one training step: forward, backward and AdamW."""
    import firstloss as fl

    with tempfile.TemporaryDirectory() as artifacts, lowered_modules() as modules:
        once = {"first_loss": "compiled"} if "first_loss" in inspect.signature(fl.backend).parameters else {}
        backend = fl.backend("XLA", artifact_dir=artifacts, **once)
        torch.manual_seed(0)
        with backend.device:
            model = build().train()
        torch.manual_seed(1)
        batch = make_batch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        compiled = fl.compile(model, backend)

        @fl.trace
        def step(batch: dict[str, Any]) -> torch.Tensor:
            loss = loss_of(compiled(**batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = [step(batch).item() for _ in range(2)]
        yield "program", strip_sources(str(step.program()))
        yield "losses", "\n".join(loss.hex() for loss in losses)
    yield "stablehlo", "\n".join(sorted(modules))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_LLAMA))


def _llama_batch(model: Any) -> dict[str, torch.Tensor]:
    tokens = torch.randint(256, (2, 16))
    return {"input_ids": tokens, "labels": tokens}


def cases(size: str) -> Iterator[tuple[str, Callable[[], Iterator[tuple[str, str]]]]]:
    """(name, function that returns its texts) of everything that is recorded."""
    from tests.fuzz import constructors as fuzz

    def fuzzed(seed: int) -> Callable[[], Any]:
        scope: dict[str, Any] = {"Holder": fuzz.Holder, "__name__": "constructor"}
        exec(compile(fuzz.generate(seed), f"<fuzzed {seed}>", "exec"), scope)
        return scope["build"]

    for policy in ("eager", "counter"):
        yield f"constructor/odd-{policy}", lambda policy=policy: of_constructor(Odd, policy, size != "tiny")
    for seed in range(_FUZZED[size]):
        yield f"constructor/fuzzed-{seed}", lambda seed=seed: of_constructor(fuzzed(seed))
    small = nn.Sequential
    mlp = lambda: small(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))  # noqa: E731
    yield (
        "step/mlp",
        lambda: of_step(mlp, lambda _: {"input": torch.randn(16, 8)}, lambda out: out.square().mean()),
    )
    if size != "tiny":
        yield from _zoos(size)


def _zoos(size: str) -> Iterator[tuple[str, Callable[[], Iterator[tuple[str, str]]]]]:
    import importlib.util

    from benchmarks import sweep_constructors as sweep
    from tests.lower import model_cases

    sweep.prepare()
    present = [zoo for zoo in CONSTRUCTORS if importlib.util.find_spec(zoo) is not None]
    if "transformers" in present:
        for policy in ("eager", "counter"):
            yield f"constructor/llama-{policy}", lambda policy=policy: of_constructor(_llama, policy, True)
        yield "step/llama", lambda: of_step(_llama, _llama_batch, model_cases.loss_of)
    for zoo in present:
        known = dict(sweep.ZOOS[zoo]())
        names = list(known) if size == "all" else CONSTRUCTORS[zoo][: _SOME[zoo]]
        for name in names:
            if name in known:
                yield f"constructor/{zoo}/{name}", lambda build=known[name]: of_constructor(build)
        for name in STEPS[zoo][: None if size == "all" else _SOME_STEPS[zoo]]:
            yield f"step/{zoo}/{name}", lambda zoo=zoo, name=name: _of_zoo_step(zoo, name)


def _of_zoo_step(zoo: str, name: str) -> Iterator[tuple[str, str]]:
    from tests.lower import model_cases

    case = model_cases.ZOOS[zoo][1](name)
    yield from of_step(lambda: model_cases.silence(case.build()), case.batch, model_cases.loss_of)


def record(size: str, only: str | None = None, tell: Callable[[str], None] = lambda line: None) -> Texts:
    """All texts by name; failures are recorded as their error."""
    texts: Texts = {}
    for name, make in cases(size):
        if only is not None and not re.search(only, name):
            continue
        tell(name)
        try:
            for what, text in make():
                texts[f"{name}/{what}"] = text
        except Exception as error:
            texts[f"{name}/error"] = f"{type(error).__name__}: {strip_sources(str(error))[:200]}"
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--size", choices=list(_FUZZED), default="some")
    parser.add_argument("--only", metavar="REGEX")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    torch.set_num_threads(1)  # PyTorch splits sums among threads
    texts = record(args.size, args.only, lambda name: print(name, file=sys.stderr, flush=True))
    with gzip.open(args.out, "wt", encoding="utf-8") as file:
        json.dump(texts, file)


if __name__ == "__main__":
    main()
