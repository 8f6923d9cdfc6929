"""A transformers model under accelerate's FSDP2: each rank initializes only its own shards of the weights.

    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py

Without Firstloss, omit the line `with fl.deferred():` and unindent the one below it: each rank then initializes the
whole model, and `prepare` takes its shards. Losses and weights are the same, bit for bit.

Requires accelerate, transformers and GPUs: on a CPU, accelerate's `prepare` always uses DDP.
"""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

import firstloss as fl


def train(steps: int, **sizes: int) -> tuple[list[float], torch.nn.Module]:
    """This rank's losses, and the model."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,  # it would initialize on rank 0 and broadcast
    )
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    config = LlamaConfig(**sizes)
    torch.manual_seed(0)  # the same on each rank
    with fl.deferred():
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    fl.materialize_module(model)
    losses = []
    for step in range(steps):
        tokens = torch.arange(32, device=accelerator.device).reshape(2, 16) * 7 + step + accelerator.process_index
        tokens = tokens % config.vocab_size
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.print(f"step {step}: loss {losses[-1]:.4f}")
    return losses, model


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    sizes = {"hidden_size": args.width, "intermediate_size": 2 * args.width, "num_hidden_layers": args.layers}
    train(args.steps, **sizes, num_attention_heads=8, vocab_size=32000)


if __name__ == "__main__":
    main()
