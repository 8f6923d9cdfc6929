"""Construct every architecture of three model zoos eagerly and deferred from one seed, and compare bit for bit.

    python -m benchmarks.sweep_constructors [transformers] [torchvision] [timm] [--limit N] [--only NAME] [--json]

Compared are weights, buffers and plain tensor attributes under every name, ties, and the final state of the generator.
Transformers' architectures are built from their configuration classes with small sizes; of torchvision and timm, the
small models are used. torchvision and timm are also looked for where `make test` installs them. The time of capture is
compared with construction on the meta device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from benchmarks import harness

# Small sizes for a transformers configuration, under the names that configurations use.
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers num_block_layers encoder_num_layers decoder_num_layers".split(),
        2,
    ),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads".split(),
        4,
    ),
    **dict.fromkeys("hidden_size d_model n_embd dim embed_dim emb_dim".split(), 32),
    **dict.fromkeys(
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff hidden_dim n_inner moe_intermediate_size "
        "shared_expert_intermediate_size".split(),
        48,
    ),
    "head_dim": 8,
    "vocab_size": 131,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "max_position_embeddings": 64,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
}
NAME = "construct every architecture of the model zoos"
GOAL = "materialized weights and the generator state are bit-identical to eager construction"
LARGEST = 40_000_000  # parameters: larger models are left out of the sweep


@dataclass
class Outcome:
    """The outcome of one architecture: `verdict` is "same", "differs", "fails" or "left out"."""

    zoo: str
    name: str
    verdict: str
    why: str = ""
    parameters: int = 0
    eager: float = 0.0
    capture: float = 0.0
    materialize: float = 0.0
    meta: float = 0.0

    @property
    def is_left_out(self) -> bool:
        return self.verdict == "left out"


def transformers_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """One small model of each architecture in transformers."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    transformers.logging.set_verbosity_error()
    for config_class in MODEL_MAPPING:
        yield config_class.model_type, lambda config_class=config_class: _from_config(config_class)


def transformers_case(model_type: str) -> Callable[[], Any]:
    """One of them, without importing all others."""
    import transformers

    transformers.logging.set_verbosity_error()
    config_class = transformers.CONFIG_MAPPING[model_type]
    return lambda: _from_config(config_class)


def _from_config(config_class: type) -> Any:
    from transformers import AutoModel

    return AutoModel.from_config(shrink(config_class()))


def shrink(config: Any) -> Any:
    """Make a configuration, and those inside it, small."""
    for name, value in SMALL.items():
        # Some configurations compute a field from others, have different values per layer, or raise on access.
        with contextlib.suppress(AttributeError, NotImplementedError, ValueError):
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, value)
    with contextlib.suppress(AttributeError):
        if isinstance(getattr(config, "layer_types", None), list):
            config.layer_types = config.layer_types[:2]
    for inner in list(vars(config).values()):
        if type(inner).__name__.endswith("Config"):
            shrink(inner)
    return config


def torchvision_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """All models of torchvision, with no weights to download."""
    models = importlib.import_module("torchvision.models")
    for name in models.list_models():
        yield name, lambda name=name: models.get_model(name, weights=None, **_no_backbone(name))


def _no_backbone(name: str) -> dict[str, Any]:
    detection = ("rcnn", "retinanet", "fcos", "ssd", "deeplab", "fcn_", "lraspp")
    return {"weights_backbone": None} if any(part in name for part in detection) else {}


def timm_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The first model of each of timm's modules, and then the others."""
    timm = importlib.import_module("timm")
    by_module = {module: timm.list_models(module=module) for module in timm.list_modules()}
    ordered = [names[0] for names in by_module.values() if names]
    ordered += [names[len(names) // 2] for names in by_module.values() if len(names) > 2]
    for name in dict.fromkeys(ordered):
        yield name, lambda name=name: timm.create_model(name)


ZOOS = {"transformers": transformers_cases, "torchvision": torchvision_cases, "timm": timm_cases}


def examine(zoo: str, name: str, build: Callable[[], Any], largest: int = LARGEST) -> Outcome:
    """Construct one architecture both ways and compare."""
    import torch

    import firstloss as fl
    from firstloss.cli import verify

    out = Outcome(zoo, name, "left out")
    try:
        for _ in range(2):  # the first time, this imports the model's modules
            began = time.perf_counter()
            with torch.device("meta"):
                model = build()
            out.meta = time.perf_counter() - began
        out.parameters = sum(p.numel() for p in model.parameters())
    except Exception:
        out.meta = 0.0  # some models cannot be built on the meta device
        with contextlib.suppress(Exception):
            out.parameters = sum(p.numel() for p in fl.deferred_init(build).parameters())
    if out.parameters > largest:
        out.why = f"{out.parameters:,} parameters"
        return out
    torch.manual_seed(0)
    began = time.perf_counter()
    try:
        eager = build()
    except Exception as error:
        out.why = f"eager construction fails too: {_one_line(error)}"
        return out
    out.eager = time.perf_counter() - began
    out.parameters = sum(p.numel() for p in eager.parameters())
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        began = time.perf_counter()
        deferred = fl.deferred_init(build)
        out.capture = time.perf_counter() - began
        after = torch.get_rng_state()
        began = time.perf_counter()
        verify.materialize(deferred)
        out.materialize = time.perf_counter() - began
    except Exception as error:
        out.verdict, out.why = "fails", _one_line(error)
        return out
    differences = verify.compare(dict(verify.named_tensors(eager)), dict(verify.named_tensors(deferred)))
    if not torch.equal(state, after):
        differences["(generator)"] = "does not end where eager leaves it"
    out.verdict = "differs" if differences else "same"
    out.why = "; ".join(f"{key} {value}" for key, value in list(differences.items())[:3])
    return out


def _against_meta(ratios: list[float]) -> str:
    quarter, middle, three_quarters = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{middle:.2f} times, median of {len(ratios)} models (quartiles {quarter:.2f} and {three_quarters:.2f})"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


def prepare() -> None:
    """Make torchvision and timm importable."""
    from benchmarks.zoo import find_zoo

    find_zoo()
    warnings.simplefilter("ignore")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("zoos", nargs="*", metavar="ZOO", help=f"one of {', '.join(ZOOS)} (default: all)")
    parser.add_argument("--limit", type=int, help="at most this many architectures of each zoo")
    parser.add_argument("--only", help="only this architecture")


def examined(args: argparse.Namespace, zoo: str, examine: Callable[..., Any]) -> Iterator[Any]:
    """The outcomes of the requested architectures of a zoo. Those left out do not count towards the limit."""
    limit, done = 3 if args.tiny else args.limit, 0
    for name, build in ZOOS[zoo]():
        if args.only in (None, name) and (limit is None or done < limit):
            outcome = examine(zoo, name, build)
            done += not outcome.is_left_out
            yield outcome


def measure(args: argparse.Namespace) -> harness.Figure:
    prepare()
    outcomes: list[Outcome] = []
    for zoo in args.zoos or ZOOS:
        for outcome in examined(args, zoo, examine):
            outcomes.append(outcome)
            print(f"  {zoo:12} {outcome.name:40} {outcome.verdict:9} {outcome.why}", file=sys.stderr, flush=True)
    rows = []
    for zoo in args.zoos or ZOOS:
        mine = [o for o in outcomes if o.zoo == zoo]
        counts = {v: sum(o.verdict == v for o in mine) for v in ("same", "differs", "fails", "left out")}
        rows.append((zoo, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())))
    ratios = [o.capture / o.meta for o in outcomes if o.verdict == "same" and o.meta]
    rows += [("capture against construction on the meta device", _against_meta(ratios))] if ratios else []
    met = not any(o.verdict in ("differs", "fails") for o in outcomes)
    return harness.Figure(NAME, GOAL, rows, met, {"outcomes": [asdict(outcome) for outcome in outcomes]})


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
