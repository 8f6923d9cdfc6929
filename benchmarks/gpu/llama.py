"""A Llama in plain PyTorch, so that the GPU machine needs no other library.

Initialized like torchtitan's and transformers': each constructor draws, and then `init_weights` draws again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    sequence: int = 512
    base: float = 500_000.0


CONFIGS = {
    "8B": Config(128_256, 4096, 14_336, 32, 32, 8),
    "1.1B": Config(32_000, 2048, 5632, 22, 32, 4),
    "tiny": Config(512, 64, 160, 3, 4, 2, sequence=32),
}


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        size = c.width // c.heads
        self.heads, self.kv_heads, self.size = c.heads, c.kv_heads, size
        self.q_proj = nn.Linear(c.width, c.heads * size, bias=False)
        self.k_proj = nn.Linear(c.width, c.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(c.width, c.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(c.heads * size, c.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q = rotated(self.q_proj(x).view(b, s, self.heads, self.size).transpose(1, 2), cos, sin)
        k = rotated(self.k_proj(x).view(b, s, self.kv_heads, self.size).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(b, s, self.kv_heads, self.size).transpose(1, 2)
        groups = self.heads // self.kv_heads
        k, v = (t[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.width, c.inner, bias=False)
        self.up_proj = nn.Linear(c.width, c.inner, bias=False)
        self.down_proj = nn.Linear(c.inner, c.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.width, 1e-5)
        self.attention = Attention(c)
        self.mlp_norm = nn.RMSNorm(c.width, 1e-5)
        self.mlp = MLP(c)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocabulary, c.width)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.width, 1e-5)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        self.register_buffer("cos", torch.empty(c.sequence, c.width // c.heads), persistent=False)
        self.register_buffer("sin", torch.empty(c.sequence, c.width // c.heads), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        c = self.config
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0.0, 0.02)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
        size = c.width // c.heads
        even = torch.arange(0, size, 2, device=self.cos.device, dtype=torch.float32)
        positions = torch.arange(c.sequence, device=self.cos.device, dtype=torch.float32)
        angles = positions[:, None] / c.base ** (even / size)
        angles = torch.cat([angles, angles], -1)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        s = tokens.shape[1]
        cos, sin = self.cos[:s], self.sin[:s]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
