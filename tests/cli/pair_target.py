"""A target whose loss, of an encoder and a decoder, shows when logical shards are compiled otherwise on one device."""

import torch
from torch import nn
from transformers import T5Config, T5Model


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"vocab_size": 131, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        self.both = T5Model(T5Config(**sizes, dropout_rate=0.0))

    def forward(self, source, target):
        out = self.both(source, torch.ones_like(source), decoder_input_ids=target, use_cache=False)
        return misfit(out.last_hidden_state) + misfit(out.encoder_last_hidden_state)


def misfit(x):
    return ((x - torch.arange(x.numel()).to(x.dtype).cos().view(x.shape)) ** 2).mean()
