"""The model and data of gpt2.yaml, written for Model Zoo: a module that returns its loss, and a data processor that
creates a DataLoader. The text is this repository's documentation, as bytes."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).parents[2]


class GPT2LMHeadModel(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_hidden_layers, num_heads, max_position_embeddings):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(max_position_embeddings, hidden_size)
        self.layers = nn.ModuleList(Block(hidden_size, num_heads) for _ in range(num_hidden_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.lm_head.weight = self.token_embedding.weight
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, data):
        tokens = data["input_ids"]
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten(), reduction="none")
        mask = data["attention_mask"].flatten()
        return (loss * mask).sum() / mask.sum()


class Block(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv, self.proj = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.up, self.down = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class ByteDataProcessor:
    def __init__(self, batch_size, max_sequence_length, shuffle=False, shuffle_seed=0):
        self.batch_size, self.length, self.shuffle, self.seed = batch_size, max_sequence_length, shuffle, shuffle_seed

    def create_dataloader(self):
        text = (ROOT / "README.md").read_bytes()
        count = (len(text) - 1) // self.length
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        samples = [
            {
                "input_ids": tokens[i * self.length : (i + 1) * self.length],
                "labels": tokens[i * self.length + 1 : (i + 1) * self.length + 1],
                "attention_mask": torch.ones(self.length),
            }
            for i in range(count)
        ]
        generator = torch.Generator().manual_seed(self.seed)
        return torch.utils.data.DataLoader(
            samples, self.batch_size, shuffle=self.shuffle, generator=generator, drop_last=True
        )
