"""One rank of the examples with transformers and accelerate, with and without the line for Firstloss.

To get the script without Firstloss, the deferred block is replaced by its contents. The trained weights are compared on
each rank, bit for bit.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import firstloss as fl
import tests.conftest  # noqa: F401 - torchvision, which transformers imports, beside a CPU build of torch

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCK = re.compile(r"^    with fl\.deferred\(\):\n    (    .*\n)", re.M)
MATERIALIZE = "    fl.materialize_module(model)\n"

# Differences in accelerate_fsdp2.py.
FSDP2 = {
    "as it is": ("", ""),
    "tied": ("LlamaConfig(**", "LlamaConfig(tie_word_embeddings=True, **"),
    "checkpointing": ("fsdp_version=2", "fsdp_version=2, activation_checkpointing=True"),
    "mixed precision": ("fsdp_plugin=plugin", "fsdp_plugin=plugin, mixed_precision='bf16'"),
    "sent by rank 0": ("cpu_ram_efficient_loading=False", "cpu_ram_efficient_loading=True"),
}


def scripts(name: str, old: str = "", new: str = "") -> Iterator[dict[str, Any]]:
    """The globals of an example: without Firstloss, unchanged, and without `materialize_module`."""
    source = (EXAMPLES / f"{name}.py").read_text()
    assert not old or source.count(old) == 1, old
    source = source.replace(old, new) if old else source
    forgotten = source.replace(MATERIALIZE, "")
    plain = BLOCK.sub(r"\1", forgotten).replace("import firstloss as fl\n", "")
    assert len({source, forgotten, plain}) == 3 and "fl." not in plain.split('"""', 2)[2]
    for text in (plain, source, forgotten):
        space = {"__name__": name}
        exec(compile(text, name, "exec"), space)
        yield space


def compare(trained: list[tuple[list[float], torch.nn.Module]]) -> None:
    """Compare losses, and weights by name."""
    (expected, weights), *others = [(losses, whole(model)) for losses, model in trained]
    assert len(expected) == 3
    for losses, state in others:
        assert losses == expected, (losses, expected)
        assert state.keys() == weights.keys()
        assert not [name for name in weights if not torch.equal(weights[name], state[name])]


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The full state dict."""
    return {
        name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().clone()
        for name, weight in model.state_dict().items()
    }


def tensor_parallel(folder: str) -> None:
    """transformers_tp.py on a checkpoint; or "distribute": distribute a deferred tensor, which must change nothing."""
    if folder == "distribute":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        distribute_tensor(fl.deferred_init(torch.ones, 8, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
        return
    compare([script["train"](folder, 3) for script in scripts("transformers_tp")])


def fsdp2(option: str) -> None:
    """accelerate_fsdp2.py; before `materialize_module`, no rank has computed anything except what rank 0 sends.

    "ddp": as it runs on a CPU, where accelerate does not support FSDP.
    """
    from accelerate.state import AcceleratorState

    deferred, sharded = [], option != "ddp"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

    def train(script: dict[str, Any]) -> tuple[list[float], torch.nn.Module]:
        AcceleratorState._reset_state(True)
        return script["train"](3, **sizes, vocab_size=300)

    materialize = fl.materialize_module

    def look(model: torch.nn.Module) -> torch.nn.Module:
        deferred.append(sharded and all(fl.is_deferred(weight.to_local()) for weight in model.parameters()))
        return materialize(model)

    fl.materialize_module = look
    compare([train(script) for script in scripts("accelerate_fsdp2", *FSDP2.get(option, ()))])
    fl.materialize_module = materialize
    assert deferred == [option not in ("sent by rank 0", "ddp")]


def take_fsdp_on_a_cpu() -> None:
    """On a CPU accelerate always uses DDP, whatever its configuration."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    begin = AcceleratorState.__init__
    if begin.__module__ == __name__:
        return  # left by an earlier case

    def init(self, *args, fsdp_plugin=None, **kwargs):
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        shared = AcceleratorState._shared_state
        if fsdp_plugin is not None and shared.get("fsdp_plugin") is None:
            shared["fsdp_plugin"] = fsdp_plugin
            shared["distributed_type"] = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if kwargs.get("mixed_precision"):
                fsdp_plugin.set_mixed_precision(kwargs["mixed_precision"])

    AcceleratorState.__init__ = init


def main(kind: str, *cases: str) -> None:
    """Run the cases, and report which one failed."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for case in cases:
        print(f"{kind}: {case}", file=sys.stderr)
        if kind == "fsdp2" and case != "ddp":
            take_fsdp_on_a_cpu()
        (fsdp2 if kind == "fsdp2" else tensor_parallel)(case)
    torch.distributed.destroy_process_group()
