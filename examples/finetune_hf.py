"""Fine-tune a Hugging Face model from a folder written by `firstloss init` (or any that from_pretrained can read).

    firstloss init CONFIG.json -o start && cp CONFIG.json start/config.json
    python -m examples.finetune_hf start

The model is constructed deferred and its weights are read from the folder; none of them is ever initialized.

Requires the extras xla and demo.
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from examples.byte_lm import StandardLibrary
from firstloss.trainer import Trainer, TrainingLoop


def labelled(pieces):
    """Add labels, so that Hugging Face models compute their loss."""
    text = torch.stack(pieces)
    return {"input_ids": text, "labels": text}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="config.json and safetensors")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="XLA")
    parser.add_argument("--out", default="runs/finetune")
    args = parser.parse_args(argv)
    config = AutoConfig.from_pretrained(args.folder)
    trainer = Trainer(
        device=args.device,
        model_dir=args.out,
        model=lambda: AutoModelForCausalLM.from_config(config),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
        loop=TrainingLoop(max_steps=args.steps, grad_accum_steps=2),
        seed=0,
    )
    data = StandardLibrary(length=64, validation=False)
    trainer.fit(torch.utils.data.DataLoader(data, 8, shuffle=True, collate_fn=labelled), ckpt_path=args.folder)
    return trainer


if __name__ == "__main__":
    main()
