"""Events between two steps: changes of the model, its hooks, the optimizer, gradients, results, modes."""

# ruff: noqa: E501 - a line of a generated program is one line here
from __future__ import annotations

from .program_builder import STEPS, Draft

# Events for any model: text, or a list of statements, each before a later step.
MODEL = (
    ("handle{n} = m.act.register_forward_hook(lambda mod, args, out: out * 2)", "handle{n}.remove()"),
    ("handle{n} = m.z.register_forward_hook(lambda mod, args, out: out + 0.1)",),
    ("handle{n} = m.z.register_forward_pre_hook(lambda mod, args: (args[0] * 0.5,))", "handle{n}.remove()"),
    ("handle{n} = m.register_forward_hook(lambda mod, args, kw, out: out * 0.5, with_kwargs=True)",),
    (
        "handle{n} = m.z.register_full_backward_hook(lambda mod, gi, go: tuple(g * 0.5 for g in gi))",
        "handle{n}.remove()",
    ),
    ("handle{n} = m.z.register_full_backward_pre_hook(lambda mod, go: (go[0] * 0.5,))", "handle{n}.remove()"),
    ("handle{n} = m.z.weight.register_hook(lambda g: g * 0.1)", "handle{n}.remove()"),
    (
        "handle{n} = m.z.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])",
        "handle{n}.remove()",
    ),
    (
        "calls{n} = []\nhandle{n} = m.act.register_forward_hook(lambda mod, args, out: calls{n}.append(out.detach()))",
        "handle{n}.remove()",
    ),
    ("calls{n} = {{}}\nhandle{n} = m.z.weight.register_hook(lambda g: calls{n}.update(g=g))",),
    ("gain{n} = [2.0]\nm.act.register_forward_hook(lambda mod, args, out: out * gain{n}[0])", "gain{n}[0] = 0.5"),
    ("m.act.forward = lambda h: h * 0.5", "del m.act.forward"),
    ("m.act.forward = torch.sin",),
    ("m.forward = lambda x, f=m.forward: f(x) * 0.5", "del m.forward"),
    ("m.z.forward = types.MethodType(lambda self, h: F.linear(h, self.weight * 0.5, self.bias), m.z)",),
    ("m.act = nn.Sigmoid()", "m.act = nn.Tanh()"),
    ("m.act = nn.Sequential(nn.Linear(5, 5), nn.Tanh())",),
    ("m._modules['act'] = nn.Sigmoid()",),
    ("setattr(m, 'act', nn.Identity())",),
    ("m.act = nn.Sequential(m.act, nn.Dropout(0.0))", "m.act.append(nn.Tanh())", "del m.act[0]"),
    ("m.z = nn.Linear(5, 3)",),
    ("m.add_module('extra{n}', nn.Linear(2, 2))",),
    ("m.register_buffer('extra{n}', torch.ones(2))", "del m.extra{n}"),
    ("m.note{n} = 'x'", "m.note{n} = 'y'", "del m.note{n}"),
    ("m.eval()", "m.train()"),
    ("m.act.eval()",),
    ("m.z.requires_grad_(False)", "m.z.requires_grad_(True)"),
    ("m.z.weight.requires_grad_(False)",),
    ("m.requires_grad_(False)\nm.z.requires_grad_(True)", "m.requires_grad_(True)"),
    ("with torch.no_grad():\n    m.z.weight.mul_(0.5)", "with torch.no_grad():\n    m.z.weight[0] = 0.1"),
    ("m.z.weight.data.clamp_(-0.2, 0.2)",),
    ("m.z.weight.data = torch.ones(3, 5) * 0.1",),
    ("m.z.weight.data = m.z.weight.data * 2",),
    ("m.z.weight.detach().copy_(torch.zeros(3, 5))",),
    ("nn.init.constant_(m.z.weight, 0.2)",),
    ("m.z.weight = nn.Parameter(torch.full((3, 5), 0.1))",),
    ("m.z.weight = nn.Parameter(m.z.weight.detach().clone())",),
    ("m.z.bias = None",),
    ("m.z.weight.detach().numpy()[0, 0] = 2.0",),
    ("array{n} = m.z.weight.detach().numpy()", "array{n} *= 0.5"),
    ("view{n} = m.z.weight.detach()[1]", "view{n}.fill_(0.3)"),
    ("m.load_state_dict({{k: v * 0.5 for k, v in m.state_dict().items()}})",),
    ("kept{n} = copy.deepcopy(m.state_dict())", "m.load_state_dict(kept{n})"),
    ("kept{n} = {{k: v.clone() for k, v in m.state_dict().items()}}", "m.load_state_dict(kept{n}, strict=False)"),
    (
        # not its bytes, which contain the last bits of the weights
        "file{n} = io.BytesIO()\ntorch.save(m.state_dict(), file{n})",
        "file{n}.seek(0)\nm.load_state_dict(torch.load(file{n}))",
    ),
    ("kept{n} = m.state_dict()",),
    ("copy{n} = copy.deepcopy(m)",),
    ("copy{n} = copy.deepcopy(m)", "copy{n}.z.weight.data.zero_()"),
    ("with torch.no_grad():\n    out{n} = m(x)",),
    ("m.eval()\nwith torch.no_grad():\n    out{n} = c(x)\nm.train()",),
    ("out{n} = m(x).detach()",),
    ("with torch.no_grad():\n    for p in m.parameters():\n        p.mul_(0.9)",),
    ("torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(m.parameters()) * 0.9, m.parameters())",),
    ("P.weight_norm(m.z)", "parametrize.remove_parametrizations(m.z, 'weight')"),
    ("m.act.__class__ = nn.Sigmoid",),
    (
        "m.half_gain{n} = 0.5\nm.act.register_forward_hook(lambda mod, args, out, owner=m: out * getattr(owner, 'half_gain{n}'))",
        "m.half_gain{n} = 2.0",
    ),
    ("Net.forward = lambda self, x: self.z(self.act(self.a(x))) * 0.5",),
    ("nn.Tanh.forward = lambda self, h: h * 0.5",),
    (
        "old{n} = nn.Linear.forward\nnn.Linear.forward = lambda self, h: F.linear(h, self.weight)",
        "nn.Linear.forward = old{n}",
    ),
    ("F.linear = lambda x, w, b=None, f=F.linear: f(x, w, b) * 0.9",),
    ("torch.Tensor.mean = lambda self, *a, f=torch.Tensor.mean, **k: f(self, *a, **k) * 1.1",),
    ("torch.optim.SGD.step = lambda self, *a: None",),
    (
        "handle{n} = torch.nn.modules.module.register_module_forward_hook(lambda mod, args, out: out * 0.9)",
        "handle{n}.remove()",
    ),
    (
        "handle{n} = torch.nn.modules.module.register_module_forward_pre_hook(lambda mod, args: tuple(a * 1.1 if a.is_floating_point() else a for a in args))",
        "handle{n}.remove()",
    ),
    ("m.apply(lambda mod: setattr(mod, 'tag{n}', 1))",),
    ("from torch.nn.utils import prune\nprune.l1_unstructured(m.z, 'weight', 4)", "prune.remove(m.z, 'weight')"),
    ("m.to(torch.get_default_dtype())",),
    # (It frees memory exported by DLPack or NumPy, which they then write to: eager PyTorch crashes.)
    ("any(k.startswith(('lent', 'wv', 'array')) for k in [*locals(), *globals()]) or m.share_memory()",),
    ("names{n} = [k for k, _ in m.named_parameters()]",),
    ("size{n} = sum(p.numel() for p in m.parameters())",),
    ("norm{n} = float(m.z.weight.norm())",),
    ("grads{n} = [p.grad for p in m.parameters()]",),
    (
        "from safetensors.torch import load, save\nkept{n} = dict(sorted(load(save({{k: v for k, v in m.state_dict().items() if v.dim() and v.is_contiguous()}})).items()))",
        "m.load_state_dict(kept{n}, strict=False)",
    ),
    ("same{n} = m.z.weight.data_ptr() == m.z.weight.detach().data_ptr()",),
    ("bytes{n} = m.z.weight.untyped_storage().nbytes()",),
    ("array{n} = np.asarray(m.z.weight.detach())", "array{n}[0] = 0.2"),
    ("lent{n} = torch.from_dlpack(m.z.weight.detach())", "lent{n}.mul_(0.5)"),
    ("kept{n} = pickle.loads(pickle.dumps(m.state_dict()))", "m.load_state_dict(kept{n})"),
    ("copy{n} = copy.copy(m)", "copy{n}.act = nn.Sigmoid()"),
    ("m.act.tag = 1.0\nNet.note = 'x'", "del Net.note"),
    ("m.z.weight.note = 'a weight'",),
    ("first{n}, second{n} = m.z.weight.detach(), m.z.weight.data", "first{n}.mul_(0.5)"),
    ("shape{n} = [tuple(p.shape) for p in m.parameters()]\ntext{n} = repr(m)",),
    ("m.z.weight.data.copy_(m.z.weight.data.flip(0))",),
    ("torch.nn.utils.parameters_to_vector(m.parameters()).sum().item()",),
    ("m.a, m.spare = nn.Linear(4, 5), m.a", "m.a = m.spare"),
    ("m.z.weight, m.z.extra = nn.Parameter(m.z.weight.detach() * 0.5), m.z.weight",),
    ("m.z.register_parameter('bias', nn.Parameter(torch.ones(3)))",),
    ("del m.z.bias\nm.z.bias = None",),
    ("m.float() if m.z.weight.dtype == torch.float32 else m.double()",),
    ("for mod in m.modules():\n    mod.extra{n} = len(list(mod.children()))",),
)
GRADIENTS = (
    ("o.zero_grad()",),
    ("m.zero_grad(set_to_none=True)",),
    ("for p in m.parameters():\n    p.grad = None",),
    ("for p in m.parameters():\n    p.grad = torch.ones_like(p)",),
    ("m.z.weight.grad = torch.ones_like(m.z.weight)",),
    ("for p in m.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)",),
    ("kept{n} = [p.grad for p in m.parameters()]", "for k in kept{n}:\n    if k is not None:\n        k.zero_()"),
    ("(c(x) ** 2).mean().backward()",),
    ("((c(x) - y) ** 2).mean().backward()\no.step()\no.zero_grad()",),
)
OPTIMIZER = (
    ("o.param_groups[0]['lr'] = 0.03",),
    ("for group in o.param_groups:\n    group['lr'] *= 0.5",),
    ("o.param_groups[0]['lr'] *= 2", "o.param_groups[0]['lr'] /= 4"),
    ("o.param_groups[0]['weight_decay'] = 0.1", "o.param_groups[0]['weight_decay'] = 0"),
    (
        "if 'momentum' in o.param_groups[0]:\n    o.param_groups[0]['momentum'] = 0.0",
        "if 'momentum' in o.param_groups[0]:\n    o.param_groups[0]['momentum'] = 0.5",
    ),
    ("if 'betas' in o.param_groups[0]:\n    o.param_groups[0]['betas'] = (0.5, 0.6)",),
    ("o.defaults['lr'] = 0.01",),
    ("extra{n} = nn.Parameter(torch.ones(3))\no.add_param_group({{'params': [extra{n}], 'lr': 0.1}})",),
    ("o.param_groups[0]['params'].pop()",),
    ("o.param_groups[0], o.param_groups[-1] = o.param_groups[-1], o.param_groups[0]",),
    ("o.load_state_dict(copy.deepcopy(o.state_dict()))",),
    ("kept{n} = copy.deepcopy(o.state_dict())", "o.load_state_dict(kept{n})"),
    (
        "file{n} = io.BytesIO()\ntorch.save(o.state_dict(), file{n})",
        "file{n}.seek(0)\no.load_state_dict(torch.load(file{n}))",
    ),
    ("o.state.clear()",),
    (
        "for s in o.state.values():\n    for v in s.values():\n        if isinstance(v, torch.Tensor) and v.dim():\n            v.mul_(0.5)",
    ),
    (
        "handle{n} = o.register_step_pre_hook(lambda opt, args, kw: [p.grad.mul_(0.1) for p in m.parameters() if p.grad is not None] and None)",
        "handle{n}.remove()",
    ),
    (
        "seen{n} = []\nhandle{n} = o.register_step_post_hook(lambda opt, args, kw: seen{n}.append(len(opt.state)))",
        "handle{n}.remove()",
    ),
    (
        "from torch.optim.optimizer import register_optimizer_step_pre_hook\nhandle{n} = register_optimizer_step_pre_hook(lambda opt, args, kw: [p.grad.mul_(0.5) for p in m.parameters() if p.grad is not None] and None)",
        "handle{n}.remove()",
    ),
    ("o.step = lambda *a: None", "del o.step"),
    ("o.step()",),
    ("del o.param_groups[0]['params'][0]",),
    ("state{n} = o.state_dict()",),
)
SWAPPED = (
    "$ = torch.optim.SGD(m.parameters(), lr=0.02)",
    "$ = torch.optim.AdamW(m.parameters(), lr=0.01)",
    "$ = type($)(m.parameters(), lr=0.05)",
)
RESULTS = (
    ("if losses:\n    losses[-1].detach().mul_(2)",),
    ("if losses:\n    losses[0].detach().add_(1)",),
    ("x = x * 0.5 if x.is_floating_point() else x.flip(0)",),
    ("y = y * 2",),
    ("y.mul_(0.5)",),
    ("first{n} = losses[0] if losses else None", "twice{n} = first{n} * 2 if first{n} is not None else None"),
    ("value{n} = float(losses[-1]) if losses else 0.0",),
    ("mean{n} = torch.stack([l.detach() for l in losses]).mean() if losses else None",),
)
MODES = (
    ("torch.manual_seed(3)",),
    ("n = 4", "n = 6"),
    ("n = 3",),
    ("n = 1",),
    ("torch.set_grad_enabled(True)",),
    ("result{n} = step.__wrapped__(x, y)",),
    ("torch.set_printoptions(precision=4)",),
    ("gc.collect()",),
)


def event(d: Draft) -> None:
    """Add one event: its parts before different steps, in order."""
    kind = d.rng.random()
    if kind < 0.5:
        parts = d.rng.choice(MODEL)
    elif kind < 0.58:
        parts = d.rng.choice(GRADIENTS)
    elif kind < 0.82:
        parts = d.rng.choice(OPTIMIZER)
    elif kind < 0.87:
        owner = "self" if d.form == "method" else "o"
        parts = (d.rng.choice(SWAPPED).replace("$", "trainer.o" if owner == "self" else "o"),)
    elif kind < 0.94:
        parts = d.rng.choice(RESULTS)
    else:
        parts = d.rng.choice(MODES)
    count = d.rng.randint(1, len(parts)) if d.chance(0.3) else len(parts)
    number = d.rng.randint(0, 999)
    steps = sorted(d.rng.sample(range(1, STEPS), count))
    for step, text in zip(steps, parts, strict=False):
        d.at(text.format(n=number), step)
