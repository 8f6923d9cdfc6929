"""Small models: a first and a last linear layer (`m.a`, `m.z`), an activation `m.act`, and a few layers between them."""

# ruff: noqa: E501 - a line of a generated program is one line here
from __future__ import annotations

from .program_builder import Draft, block

WIDTH = 5  # between the first and the last layer
INPUTS, OUTPUTS, BATCH = 4, 3, 6

# name: (statements of __init__, statements of forward that map h to h)
PARTS: dict[str, tuple[str, str]] = {
    "layernorm": ("self.norm = nn.LayerNorm(5)", "h = self.norm(h)"),
    "batchnorm": ("self.bn = nn.BatchNorm1d(5)", "h = self.bn(h)"),
    "batchnorm average": ("self.bn = nn.BatchNorm1d(5, momentum=None)", "h = self.bn(h)"),
    "batchnorm plain": ("self.bn = nn.BatchNorm1d(5, affine=False, momentum=0.3)", "h = self.bn(h)"),
    "groupnorm": ("self.gn = nn.GroupNorm(1, 5)", "h = self.gn(h)"),
    "dropout": ("self.drop = nn.Dropout(0.0)", "h = self.drop(h)"),
    "sequential": ("self.seq = nn.Sequential(nn.Linear(5, 5), nn.Tanh())", "h = self.seq(h)"),
    "module list": (
        "self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))",
        "for layer in self.layers:\n    h = h + layer(h).tanh()",
    ),
    "module dict": (
        "self.heads = nn.ModuleDict({'p': nn.Linear(5, 5), 'q': nn.Identity()})\nself.which = 'p'",
        "h = self.heads[self.which](h)",
    ),
    "conv": ("self.conv = nn.Conv1d(1, 1, 3, padding=1)", "h = self.conv(h.unsqueeze(1)).squeeze(1)"),
    "gru cell": (
        "self.cell = nn.GRUCell(5, 5)\nself.state = None",
        "self.state = self.cell(h, None if self.state is None or self.state.shape != h.shape else self.state.detach())\nh = self.state",
    ),
    "lstm cell": (
        "self.cell = nn.LSTMCell(5, 5)\nself.state = None",
        "old = self.state\nself.state = self.cell(h, old if old is not None and old[0].shape == h.shape else None)\n"
        "self.state = tuple(s.detach() for s in self.state)\nh = h + self.state[0]",
    ),
    "rnn": ("self.rnn = nn.RNN(5, 5, batch_first=True)", "h = self.rnn(h.unsqueeze(1))[0].squeeze(1)"),
    "weight norm": ("self.wn = P.weight_norm(nn.Linear(5, 5))", "h = self.wn(h)"),
    "spectral norm": ("self.sn = P.spectral_norm(nn.Linear(5, 5))", "h = self.sn(h)"),
    "old weight norm": ("self.wn = torch.nn.utils.weight_norm(nn.Linear(5, 5))", "h = self.wn(h)"),
    "old spectral norm": ("self.sn = torch.nn.utils.spectral_norm(nn.Linear(5, 5))", "h = self.sn(h)"),
    "orthogonal": ("self.orth = P.orthogonal(nn.Linear(5, 5), orthogonal_map='cayley')", "h = self.orth(h)"),
    "tied": (
        "self.tied = nn.Linear(5, 5)\nself.twin = nn.Linear(5, 5)\nself.twin.weight = self.tied.weight",
        "h = self.twin(self.tied(h).tanh())",
    ),
    "tied by hand": (
        "self.p = nn.Parameter(torch.randn(5, 5) * 0.3)\nself.q = self.p",
        "h = h + F.linear(h @ self.p, self.q)",
    ),
    "transposed alias": (
        "self.p = nn.Parameter(torch.randn(5, 5) * 0.3)\nself.pt = self.p.detach().t()",
        "h = h + (h @ self.p).tanh() @ self.pt",
    ),
    "cache of weight": (
        "self.p = nn.Parameter(torch.ones(5))\nself.cache = self.p.detach()",
        "h = h * self.p + h * self.cache\nself.cache = self.p.detach() * 0.5",
    ),
    "scale": ("self.scale = nn.Parameter(torch.ones(5))\nself.gain = 0.9", "h = h * self.scale * self.gain"),
    "attribute counter": ("self.calls = 0", "self.calls += 1"),
    "attribute switch": ("self.calls = 0", "self.calls += 1\nif self.calls > 4:\n    h = h * 0.5"),
    "running buffer": (
        "self.register_buffer('running', torch.zeros(5))",
        "if self.training:\n    self.running = self.running * 0.9 + h.detach().mean(0) * 0.1\nh = h - self.running",
    ),
    "running buffer in place": (
        "self.register_buffer('running', torch.zeros(5))",
        "with torch.no_grad():\n    self.running.mul_(0.9).add_(h.mean(0), alpha=0.1)\nh = h - self.running",
    ),
    "integer buffer": (
        "self.register_buffer('seen', torch.zeros((), dtype=torch.long))",
        "self.seen += h.shape[0]\nh = h / (1 + 0.01 * self.seen)",
    ),
    "kept activations": ("self.kept = []", "self.kept.append(h.detach())"),
    "last activation": ("self.last = None", "self.last = h.detach()"),
    "previous activation": (
        "self.last = None",
        "if self.last is not None and self.last.shape == h.shape:\n    h = h + 0.1 * self.last\nself.last = h.detach()",
    ),
    "activations by name": ("self.acts = {}", "self.acts['h'] = h.detach()\nself.acts.setdefault('first', h.detach())"),
    "embedding": ("self.emb = nn.Embedding(7, 5)", "h = h + self.emb(torch.arange(h.shape[0]) % 7)"),
    "embedding bag": (
        "self.bag = nn.EmbeddingBag(7, 5, mode='sum')",
        "h = h + self.bag(torch.arange(h.shape[0]).unsqueeze(1) % 7)",
    ),
    "padded embedding": (
        "self.emb = nn.Embedding(7, 5, padding_idx=0, max_norm=None)",
        "h = h + self.emb(torch.arange(h.shape[0]) % 7)",
    ),
    "attention": (
        "self.mha = nn.MultiheadAttention(5, 1, batch_first=True)",
        "h = h + self.mha(h[None], h[None], h[None], need_weights=False)[0][0]",
    ),
    "prelu": ("self.prelu = nn.PReLU()", "h = self.prelu(h)"),
    "checkpoint": (
        "self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh())",
        "h = torch.utils.checkpoint.checkpoint(self.inner, h, use_reentrant=False)",
    ),
    "parameter list": (
        "self.ps = nn.ParameterList([nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(5))])",
        "h = h * self.ps[0] + self.ps[1]",
    ),
    "parameter dict": ("self.pd = nn.ParameterDict({'w': nn.Parameter(torch.ones(5))})", "h = h * self.pd['w']"),
    "method as attribute": ("self.post = torch.tanh", "h = self.post(h)"),
    "computed attribute": (
        "self.l0 = nn.Linear(5, 5)\nself.l1 = nn.Linear(5, 5)",
        "for i in range(2):\n    h = getattr(self, 'l%d' % i)(h).tanh()",
    ),
    "frozen": ("self.fixed = nn.Linear(5, 5).requires_grad_(False)", "h = h + self.fixed(h).tanh()"),
    "hook in constructor": (
        "self.hooked = nn.Linear(5, 5)\nself.hooked.register_forward_hook(lambda mod, args, out: out.tanh())",
        "h = self.hooked(h)",
    ),
    "config": ("self.cfg = {'slope': 0.1, 'flags': ['x']}", "h = F.leaky_relu(h, self.cfg['slope'])"),
    "by training": ("self.noise = 0.5", "h = h * (self.noise if self.training else 1.0)"),
    "constant tensor": ("self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5])", "h = h * self.mask"),
    "lazy": ("self.lazy = None", "if self.lazy is None:\n    self.lazy = torch.full((5,), 0.5)\nh = h * self.lazy"),
    "position view": ("self.table = torch.randn(9, 5)\nself.pos = self.table[2:]", "h = h + self.pos[: h.shape[0]]"),
    "skip list": ("self.skips = [1.0, 0.5]", "h = sum(s * h for s in self.skips)"),
}


def model(d: Draft) -> None:
    """Add a class `Net`, and the statements that create `m` from it."""
    count = d.rng.choice((0, 1, 1, 2, 2, 3))
    init = ["super().__init__()"]
    ids = d.chance(0.12)
    init.append(f"self.a = {'nn.Embedding(9, 5)' if ids else 'nn.Linear(4, 5)'}")
    if ids:
        d.linears.remove("a")
    init.append(f"self.act = nn.{d.pick('Tanh', 'Tanh', 'GELU', 'SiLU', 'Sigmoid')}()")
    forward = ["h = self.act(self.a(x))"]
    used: set[str] = set()
    for name in d.rng.sample(sorted(PARTS), count):
        first, then = PARTS[name]
        attributes = {line.partition(" = ")[0] for line in first.splitlines() if line.startswith("self.")}
        if attributes & used:
            continue
        used |= attributes
        init.append(first)
        forward.append(then)
    init.append(f"self.z = nn.Linear(5, 3{', bias=False' if d.chance(0.1) else ''})")
    forward.append("return self.z(h)")
    text = "class Net(nn.Module):\n    def __init__(self):\n" + "\n".join(block(line, 2) for line in init)
    text += "\n\n    def forward(self, x):\n" + "\n".join(block(line, 2) for line in forward)
    d.top.append(text)
    d.batch.append("x = torch.randint(0, 9, (n,), generator=g)" if ids else "x = torch.randn(n, 4, generator=g)")
    d.batch.append("y = torch.randn(n, 3, generator=g)")
    d.construct.append(
        d.pick(
            "with b.device:\n    m = Net()",
            "with b.device:\n    m = Net()",
            "with b.device:\n    m = Net()",
            "m = Net()",
            "with b.device:\n    m = Net()\nfor p in m.parameters():\n    p.data.mul_(0.5)",
            "with b.device:\n    m = Net()\n    m.apply(lambda mod: isinstance(mod, nn.Linear) and nn.init.normal_(mod.weight, std=0.3))",
        )
    )
