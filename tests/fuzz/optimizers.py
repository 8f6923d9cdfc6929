"""Optimizers, and how a step uses them."""

# ruff: noqa: E501 - a line of a generated program is one line here
from __future__ import annotations

import os

from .program_builder import Draft

ALWAYS_OWN = "FIRSTLOSS_FUZZ_OWN"  # set in the environment: each program has an optimizer of its own

_STOCK = (
    "torch.optim.SGD({p}, lr=0.1)",
    "torch.optim.SGD({p}, lr=0.1, momentum=0.9)",
    "torch.optim.SGD({p}, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "torch.optim.SGD({p}, lr=0.1, momentum=0.9, dampening=0.1)",
    "torch.optim.SGD({p}, lr=0.1, momentum=0.9, foreach=False)",
    "torch.optim.SGD({p}, lr=0.05, momentum=0.5, maximize=True)",
    "torch.optim.SGD({p}, lr=torch.tensor(0.1))",
    "torch.optim.AdamW({p}, lr=0.02)",
    "torch.optim.AdamW({p}, lr=0.02, foreach=False)",
    "torch.optim.AdamW({p}, lr=0.02, amsgrad=True)",
    "torch.optim.AdamW({p}, lr=torch.tensor(0.02))",
    "torch.optim.AdamW({p}, lr=0.02, capturable=False, betas=(0.8, 0.9))",
    "torch.optim.AdamW({p}, lr=0.02, fused=True)",
    "torch.optim.Adam({p}, lr=0.02)",
    "torch.optim.Adam({p}, lr=0.02, weight_decay=0.1)",
    "torch.optim.Adamax({p}, lr=0.02)",
    "torch.optim.NAdam({p}, lr=0.02)",
    "torch.optim.RAdam({p}, lr=0.02)",
    "torch.optim.Adagrad({p}, lr=0.05)",
    "torch.optim.Adadelta({p}, lr=0.5)",
    "torch.optim.RMSprop({p}, lr=0.02)",
    "torch.optim.RMSprop({p}, lr=0.02, momentum=0.5, centered=True)",
    "torch.optim.Rprop({p}, lr=0.02)",
    "torch.optim.ASGD({p}, lr=0.05)",
    "torch.optim.Adafactor({p}, lr=0.02)",
    "torch.optim.SGD([{{'params': [m.z.weight], 'lr': 0.2}}, {{'params': [q for q in {p} if q is not m.z.weight]}}], lr=0.05)",
    "torch.optim.AdamW([{{'params': [q]}} for q in {p}], lr=0.02)",
    "torch.optim.SGD(m.named_parameters(), lr=0.1, momentum=0.9)",
    "fl.optim.Lion({p}, lr=0.01)",
    "fl.optim.AdamW({p}, lr=0.02)",
    "fl.optim.SGD({p}, lr=0.1, momentum=0.9)",
)
_OWN = (
    """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["avg"] = torch.zeros_like(p)
                    state["n"] = 0
                state["n"] += 1
                state["avg"].lerp_(p.grad, 0.3)
                p.add_(state["avg"], alpha=-group["lr"])
""",
    """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    old = self.state[p].get("last", p.grad)
                    p.sub_((p.grad + 0.5 * old) * group["lr"] / (1 + 0.1 * self.calls))
                    self.state[p]["last"] = p.grad
""",
    """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        self.norms = [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
        super().step(closure)
""",
    """
class Own:
    def __init__(self, params, lr=0.1):
        self.params = list(params)
        self.param_groups = [{"params": self.params, "lr": lr}]
        self.velocity = [torch.zeros_like(p) for p in self.params]

    def step(self):
        with torch.no_grad():
            for p, v in zip(self.params, self.velocity):
                if p.grad is not None:
                    v.mul_(0.5).add_(p.grad)
                    p.add_(v, alpha=-self.param_groups[0]["lr"])

    def zero_grad(self):
        for p in self.params:
            p.grad = None
""",
)
_SCHEDULERS = (
    "torch.optim.lr_scheduler.ExponentialLR(o, 0.8)",
    "torch.optim.lr_scheduler.StepLR(o, 3, 0.5)",
    "torch.optim.lr_scheduler.MultiStepLR(o, [2, 5], 0.5)",
    "torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + 0.3 * k))",
    "torch.optim.lr_scheduler.MultiplicativeLR(o, lambda k: 0.9)",
    "torch.optim.lr_scheduler.CosineAnnealingLR(o, 6)",
    "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3)",
    "torch.optim.lr_scheduler.LinearLR(o, 0.3, total_iters=4)",
    "torch.optim.lr_scheduler.PolynomialLR(o, 6, 2.0)",
    "torch.optim.lr_scheduler.ConstantLR(o, 0.5, total_iters=3)",
    "torch.optim.lr_scheduler.SequentialLR(o, [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.8)], [3])",
    "torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ExponentialLR(o, 0.9), torch.optim.lr_scheduler.StepLR(o, 3, 0.5)])",
    "torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5)",
    "torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30)",
    "torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False)",
    "torch.optim.swa_utils.SWALR(o, 0.02, anneal_epochs=4)",
)


# Of optimizers whose state has any form: where a weight's state is created, of what, how it is read and updated; what
# the optimizer keeps for itself; and how it comes to its rate. `{z}` is a new tensor.
_CREATED = ("if not state:", "if len(state) == 0:", "if 'a' not in state:")
_NEW = (
    "torch.zeros_like(p)",
    "torch.ones_like(p)",
    "p.clone()",
    "p.grad.clone()",
    "torch.zeros(p.shape, dtype=p.dtype)",
)
_FORMS = (
    ("state['a'] = {z}", "avg = state['a']"),
    ("state['a'] = [{z}, {z}]", "avg = state['a'][state.setdefault('i', 0) % 2]\nstate['i'] += 1"),
    ("state['a'] = [{z}, {z}]", "avg = state['a'][1]\nstate['a'][0].add_(avg)"),
    ("state['a'] = {{'fast': {z}, 'slow': ({z}, {z})}}", "avg = state['a']['slow'][0]\navg.add_(state['a']['fast'])"),
    ("state['a'], state['n'] = {z}, 0", "state['n'] += 1\navg = state['a'].div_(1 + 0.1 * state['n'])"),
    ("state['a'], state['t'] = {z}, torch.tensor(0.0)", "state['t'] += 1\navg = state['a'].div_(1 + 0.1 * state['t'])"),
)
_UPDATES = (
    "avg.lerp_(p.grad, 0.3)\np.add_(avg, alpha=-rate)",
    "avg.mul_(0.5).add_(p.grad)\np.sub_(avg * rate)",
    "p.sub_(p.grad if p in new else p.grad + 0.1 * avg, alpha=rate)\navg.copy_(p.grad)",
    "d = torch._foreach_mul([p.grad, avg], 0.5)\ntorch._foreach_mul_(d, d)\np.sub_(p.grad + 0.1 * (d[0] - d[1]), alpha=rate)\navg.lerp_(p.grad, 0.2)",
)
_KEPT = (  # where it is created, and what the rate is multiplied by
    ("", "1.0"),
    ("", "1.0"),
    (
        "if 'k' not in self.state:\n    self.state['k'] = torch.tensor([0.0])\nself.state['k'].add_(1)",
        "1 / (1 + 0.1 * self.state['k'])",
    ),
    ("self.state['total'] = self.state.get('total', 0) + 1", "1 / (1 + 0.1 * self.state['total'])"),
    ("group['seen'] = group.get('seen', 0) + 1", "min(1.0, group['seen'] / 3)"),
    (
        "group['top'] = max(group['lr'] * 2, group.get('top', 0.0))\ngroup['sum'] = group.get('sum', 0.0) + group['top'] ** 2",
        "group['top'] ** 2 / group['sum']",
    ),
    (
        "group['norm'] = torch.maximum(group.get('norm', torch.zeros(())), group['params'][0].detach().norm())",
        "1 / (1 + group['norm'])",
    ),
    ("self.calls = getattr(self, 'calls', 0) + 1", "(1 if self.calls < 4 else 0.5)"),
)
_RATES = (
    "rate = group['lr']",
    "rate = float(group['lr'])",
    "rate = group['lr']\nrate *= 0.9",
    "rate = group['lr'] if group['lr'] > 0 else 0.1",
)


def _own(d: Draft) -> str:
    """The class of an optimizer with state of any form."""
    create, use = d.pick(*_FORMS)
    keep, factor = d.pick(*_KEPT)
    body = (
        f"state = self.state[p]\n{d.pick(*_CREATED)}\n    {create.format(z=d.pick(*_NEW))}\n{use}\n{d.pick(*_UPDATES)}"
    )
    group = f"{keep}\n{d.pick(*_RATES)}\nrate = rate * ({factor})\nfor p in group['params']:\n    if p.grad is None:\n        continue"
    new = "new = {p for g in self.param_groups for p in g['params'] if p not in self.state}"
    lines = [*indented(group, 3), *indented(body, 4)]
    head = "class Own(torch.optim.Optimizer):\n    def __init__(self, params, lr=0.1):\n        super().__init__(params, dict(lr=lr))\n"
    head += f"\n    @torch.no_grad()\n    def step(self, closure=None):\n        {new}\n        for group in self.param_groups:\n"
    return head + "\n".join(lines)


def indented(text: str, depth: int) -> list[str]:
    """The lines of a text, indented."""
    return ["    " * depth + line for line in text.splitlines() if line]


def optimizer(d: Draft) -> None:
    """Add the statements that create `o`, and those of the step that use it."""
    params = d.pick(
        "m.parameters()", "m.parameters()", "list(m.parameters())", "[q for q in m.parameters() if q.requires_grad]"
    )
    own = d.chance(0.15 if ALWAYS_OWN not in os.environ else 1.0)
    if own:
        d.top.append(_own(d) if d.chance(0.7) else d.rng.choice(_OWN).strip("\n"))
        d.construct.append(f"o = Own({params})")
    else:
        d.construct.append(f"o = {d.rng.choice(_STOCK).format(p=params)}")
    zero = (
        "$o.zero_grad()"
        if own
        else d.pick(*["$o.zero_grad()"] * 3, "$o.zero_grad(set_to_none=False)", "$m.zero_grad()")
    )
    ordinary = [f"$o.step()\n{zero}"] * 12
    clip = d.pick(
        "torch.nn.utils.clip_grad_norm_($m.parameters(), 0.5)",
        "torch.nn.utils.clip_grad_value_($m.parameters(), 0.05)",
        "norm = torch.nn.utils.clip_grad_norm_($m.parameters(), 1.0)",
        "torch.nn.utils.clip_grad_norm_([p for p in $m.parameters() if p.grad is not None], 0.3, foreach=False)",
    )
    if d.chance(0.2):
        d.grads.append(clip)
    kind = d.rng.random()
    if kind < 0.08:  # accumulation, with a counter in the step
        acc = d.name("acc")
        d.setup.append(f"{acc} = [0]")
        d.update.append(f"{acc}[0] += 1\nif {acc}[0] % 2 == 0:\n    $o.step()\n    {zero}")
    elif kind < 0.12:  # gradients set outside the step
        d.update.append("$o.step()")
        d.each.append(zero.replace("$", ""))
    elif kind < 0.15:  # never cleared
        d.update.append("$o.step()")
    elif kind < 0.18:
        d.pre.append(zero)
        d.update.append("$o.step()")
    else:
        d.update.append(d.rng.choice(ordinary))
    if d.chance(0.12):
        two = d.name("o")
        d.setup.append(
            f"{two} = torch.optim.{d.pick('SGD([m.z.weight], lr=0.05, momentum=0.9)', 'Adam([m.z.weight], lr=0.01)')}"
        )
        d.update.insert(0, f"{two}.step()")
    if not own and d.chance(0.22):
        s = d.name("sched")
        scheduler = d.rng.choice(_SCHEDULERS)
        d.setup.append(f"{s} = {scheduler}")
        argument = "float(loss)" if "Plateau" in scheduler else ""
        if argument or d.chance(0.7):
            d.after.append(f"{s}.step({argument})")
        else:
            d.post.append(f"{s}.step()")
    if d.chance(0.07):
        avg = d.name("avg")
        extra = d.pick("", "", ", multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)")
        d.setup.append(f"{avg} = torch.optim.swa_utils.AveragedModel(m{extra})")
        (d.post if d.chance(0.5) else d.after).append(f"{avg}.update_parameters({'$m' if False else 'm'})")
