"""Python state that steps keep from call to call: tensors, numbers, collections."""

# ruff: noqa: E501 - a line of a generated program is one line here
from __future__ import annotations

import textwrap

from . import objects
from .places import Place, place, variable
from .program_builder import Draft, block

STATS = (
    "out.detach().mean(0)",
    "out.detach()[0]",
    "(out.detach().sum(0) * 0.1)",
    "y.mean(0)",
    "y[1]",
    "(torch.zeros(3) + loss.detach())",
    "$m.z.weight.detach().sum(1)",
    "$m.z.weight.detach()[:, 0].clone()",
    "$m.z.weight.detach()[:, 1]",
    "$m.z.weight.data[:, 0]",
    "torch.full((3,), 0.5)",
    "(out.detach() - y).abs().amax(0)",
    "out.mean(0).detach().clone()",
)
INITIAL = (
    "torch.zeros(3)",
    "torch.zeros(3)",
    "torch.ones(3)",
    "torch.arange(3.0)",
    "base[1:4]",
    "base[2:5]",
    "base.view(4, 3)[1]",
    "base.view(3, 4).t()[1]",
    "base.view(4, 3)[:3, 0]",
    "base.expand(2, 12)[1, 3:6]",
    "m.z.weight.detach()[:, 0]",
    "m.z.weight.detach()[:, 1]",
    "m.z.weight.data.sum(1)",
    "torch.from_numpy(table)",
    "torch.from_numpy(table)[:]",
    "torch.zeros(3).requires_grad_(False)",
    "torch.zeros(1).expand(3)",
)


def _outside(d: Draft, text: str) -> None:
    """`base` and `table` are existing outside data."""
    if "base" in text and "base" not in d.names:
        d.names.append("base")
        d.early.append("base = torch.arange(12.0) / 12")
    if "table" in text and "table" not in d.names:
        d.names.append("table")
        d.early.append(f"table = np.ones(3, dtype=np.{'float64' if d.double else 'float32'})")


def _initial(d: Draft) -> str:
    text = d.rng.choice(INITIAL)
    _outside(d, text)
    return text


def _use(d: Draft, p: Place) -> None:
    """Let the loss depend on a kept vector, or not."""
    use = d.pick("none", "loss", "loss", "out", "loss late", "if there")
    if use == "loss":
        d.mid.append(f"loss = loss + 0.1 * ({p.get} * out.mean(0)).sum()")
    elif use == "out":
        d.mid.insert(0, f"loss = loss + 0.05 * ((out + {p.get}) ** 2).mean()")
    elif use == "if there":
        d.mid.append(f"if {p.get} is not None:\n    loss = loss + 0.1 * ({p.get} * out.mean(0)).sum()")
    elif use == "loss late":
        d.post.append(f"loss = loss.detach() + {p.get}.sum()")


def rebound(d: Draft) -> None:
    """A tensor in some place, replaced at each step by one computed from it."""
    p = place(d, _initial(d))
    stat = d.rng.choice(STATS)
    update = d.pick(
        f"{p.get} * 0.5 + {stat}",
        f"{p.get} * 0.5 + {stat}",
        f"0.9 * {p.get} + 0.1 * {stat}",
        f"torch.lerp({p.get}, {stat}, 0.3)",
        stat,
        f"({p.get} + {stat}).tanh()",
        f"torch.maximum({p.get}, {stat})",
    )
    _use(d, p)
    before = d.chance(0.3) and "loss" not in update
    (d.mid if before else d.post).append(p.put(update))
    if d.chance(0.35):
        _keep_older(d, p)


def _keep_older(d: Draft, p: Place) -> None:
    """References to earlier states."""
    kept = d.name("older")
    outside = p.get.replace("$", "")
    kind = d.rng.random()
    if kind < 0.4 and "self." not in p.get:
        d.setup.append(f"{kept} = []")
        d.after.append(f"{kept}.append({outside})")
    elif kind < 0.6:
        d.setup.append(f"{kept} = []")
        d.pre.append(f"{kept}.append({p.get})")
    elif kind < 0.8:
        d.setup.append(f"{kept} = {{}}")
        d.post.append(f"{kept}.setdefault('first', {p.get})\n{kept}['last'] = {p.get}")
    else:
        other = place(d, "None")
        d.pre.append(other.put(p.get))


def edited(d: Draft) -> None:
    """A tensor in some place, edited in place at each step."""
    p = place(d, _initial(d))
    stat = d.rng.choice(STATS)
    t = p.get
    edit = d.pick(
        f"{t}.mul_(0.5).add_({stat})",
        f"{t}.lerp_({stat}, 0.3)",
        f"{t}.copy_({stat})",
        f"{t}[0] = {stat}[1]",
        f"{t}[1:] += {stat}[1:]",
        f"{t}.zero_()",
        f"{t}.add_({stat}, alpha=0.1)",
        f"torch.add({t}, {stat}, out={t})",
        f"{t}.fill_(0.3)",
        p.put(f"{t}.mul_(0.5).add_({stat})"),
        *([f"{t} += {stat}", f"{t} *= 0.5"] if p.assignable else []),
    )
    _use(d, p)
    d.post.append(f"with torch.no_grad():\n    {edit}")
    if d.chance(0.25):
        _keep_older(d, p)


def swapped(d: Draft) -> None:
    """Two places that swap their contents."""
    p, q = place(d, _initial(d)), place(d, _initial(d))
    _use(d, p)
    stat = d.rng.choice(STATS)
    if p.assignable and q.assignable and d.chance(0.6):
        d.post.append(f"{p.get}, {q.get} = {q.get}, {p.get} * 0.5 + {stat}")
    else:
        d.post.append(f"tmp = {p.get}\n{p.put(q.get)}\n{q.put(f'tmp * 0.5 + {stat}')}")


def chained(d: Draft) -> None:
    """One new object under two names."""
    p, q = place(d, _initial(d)), place(d, "None")
    stat = d.rng.choice(STATS)
    _use(d, p)
    if p.assignable and q.assignable:
        d.post.append(f"{p.get} = {q.get} = {p.get} * 0.5 + {stat}")
    else:
        d.post.append(f"{p.put(f'{p.get} * 0.5 + {stat}')}\n{q.put(p.get)}")


def appended(d: Draft) -> None:
    """A collection of tensors that grows."""
    stat = d.rng.choice((*STATS, "loss.detach()", "loss.detach().clone()", "out.detach()", "x", "y", "loss"))
    s = d.name("hist")
    init, add, last = d.pick(
        ("[]", f"{s}.append({stat})", f"{s}[-1]"),
        ("[]", f"{s}.insert(0, {stat})", f"{s}[0]"),
        ("[]", f"{s} += [{stat}]" if d.form == "x" else f"{s}.extend([{stat}])", f"{s}[-1]"),
        ("collections.deque(maxlen=3)", f"{s}.append({stat})", f"{s}[-1]"),
        ("collections.deque()", f"{s}.appendleft({stat})", f"{s}[0]"),
        ("{}", f"{s}[len({s})] = {stat}", f"{s}[max({s})]"),
        ("{}", f"{s}['v'] = {stat}", f"{s}['v']"),
        ("collections.defaultdict(list)", f"{s}['v'].append({stat})", f"{s}['v'][-1]"),
        ("collections.OrderedDict()", f"{s}['v'] = {stat}", f"{s}['v']"),
        ("[]", f"{s}.append((len({s}), {stat}))", f"{s}[-1][1]"),
        ("[]", f"{s}.append({{'stat': {stat}, 'n': [len({s})]}})", f"{s}[-1]['stat']"),
        ("[]", f"{s}.append(types.SimpleNamespace(v={stat}))", f"{s}[-1].v"),
        ("types.SimpleNamespace(h=[], n=0)", f"{s}.h.append({stat})\n{s}.n += 1", f"{s}.h[-1]"),
    )
    d.setup.append(f"{s} = {init}")
    d.post.append(add)
    use = d.rng.random()
    numeric = "loss" not in stat or "zeros" in stat
    if use < 0.3 and numeric and stat not in ("x", "y", "out.detach()"):
        d.mid.append(
            f"if {s}:\n    loss = loss + 0.01 * ({last} * out.mean(0)).sum()" if "Simple" not in init else "pass"
        )
    elif (
        use < 0.4
        and init in ("[]",)
        and add.startswith(f"{s}.append({stat})")
        and stat not in ("x", "y", "out.detach()")
    ):
        d.post.append(f"loss = loss.detach() + torch.stack({s}[-2:]).sum()")


def by_name(d: Draft) -> None:
    """An average, a copy or a reference of each weight, by name."""
    s = d.name("ema")
    kind = d.pick("ema", "ema", "lerp", "snapshot", "alias", "first", "grads", "distance", "by param")
    if kind == "ema":
        d.setup.append(f"{s} = {{}}")
        d.post.append(f"for k, p in $m.named_parameters():\n    {s}[k] = {s}.get(k, 0.0) * 0.9 + p.detach() * 0.1")
    elif kind == "lerp":
        d.setup.append(f"{s} = {{k: p.detach().clone() for k, p in m.named_parameters()}}")
        d.post.append(f"for k, p in $m.named_parameters():\n    {s}[k].lerp_(p.detach(), 0.1)")
    elif kind == "snapshot":
        d.setup.append(f"{s} = []")
        d.post.append(f"{s}.append({{k: v.detach().clone() for k, v in $m.state_dict().items()}})")
    elif kind == "alias":
        d.setup.append(f"{s} = {{}}")
        d.post.append(f"{s}.update({{k: v.detach() for k, v in $m.named_parameters()}})")
    elif kind == "first":
        d.setup.append(f"{s} = {{}}")
        d.post.append(f"for k, p in $m.named_parameters():\n    {s}.setdefault(k, p.detach().clone())")
    elif kind == "grads":
        d.setup.append(f"{s} = []")
        d.grads.append(f"{s}[:] = [p.grad{d.pick('', '.clone()')} for p in $m.parameters() if p.grad is not None]")
    elif kind == "distance":
        d.setup.append(f"{s} = [p.detach().clone() for p in m.parameters()]")
        d.mid.append(
            f"loss = loss + 0.01 * sum(((p - q) ** 2).sum() for p, q in zip($m.parameters(), {s}) if p.shape == q.shape)"
        )
        if d.chance(0.6):
            d.post.append(f"{s}[:] = [p.detach().clone() for p in $m.parameters()]")
    else:
        d.setup.append(f"{s} = {{}}")
        d.post.append(f"for p in $m.parameters():\n    {s}[p] = {s}.get(p, torch.zeros_like(p)) * 0.5 + p.detach()")


def buffer_ring(d: Draft) -> None:
    """A tensor as a ring buffer, indexed by a Python number or a tensor."""
    s = d.name("ring")
    if d.chance(0.5):
        n = variable(d, "0")
        d.setup.append(f"{s} = torch.zeros(4, 3)")
        d.post.append(f"with torch.no_grad():\n    {s}[{n.get} % 4] = {d.rng.choice(STATS)}\n{n.put(n.get + ' + 1')}")
    else:
        at = d.name("at")
        d.setup.append(f"{s} = torch.zeros(4, 3)\n{at} = torch.zeros((), dtype=torch.long)")
        d.post.append(f"{s}.index_copy_(0, ({at} % 4).reshape(1), {d.rng.choice(STATS)}[None])\n{at}.add_(1)")
    if d.chance(0.5):
        d.mid.append(f"loss = loss + 0.01 * ({s}.mean(0) * out.mean(0)).sum()")


def views(d: Draft) -> None:
    """Views of one outside tensor, read and perhaps edited."""
    t, u = d.name("t"), d.name("u")
    _outside(d, "base")
    first = d.pick("base[1:4]", "base[4:7]", "base.view(4, 3)[2]", "base[::4]", "base.view(3, 4)[:, 1]")
    second = d.pick("base[3:6]", "base[2:5]", "base.view(4, 3)[:, 0][:3]", "base[-3:]", "base[1:4]", "base.flip(0)[:3]")
    d.setup.append(f"{t}, {u} = {first}, {second}")
    d.mid.append(f"loss = loss + 0.1 * (({t} + 2 * {u}) * out.mean(0)).sum()")
    if d.chance(0.6):
        d.post.append(
            d.pick(
                f"{t}.mul_(0.9)", f"{t}.add_(0.1)\n{u}.mul_(2)", "base.mul_(0.9)", f"{u}.copy_({d.rng.choice(STATS)})"
            )
        )
        if "base" in d.post[-1]:
            d.names.append("base") if "base" not in d.names else None


def weight_view(d: Draft) -> None:
    """A view of a weight, created once outside the step."""
    t = d.name("wv")
    view = d.pick(
        "m.z.weight.detach()[0]",
        "m.z.weight.detach().t()",
        "m.z.weight[1:].detach()",
        "m.z.weight.data",
        "m.z.weight.detach().view(-1)[4:9]",
        "m.z.weight.detach().numpy()",
        "m.z.weight.detach()",
    )
    d.setup.append(f"{t} = {view}")
    if "numpy" not in view:
        d.mid.append(
            f"loss = loss + 0.01 * ({t} ** 2).sum()" if d.chance(0.6) else f"loss = loss * (1 + 0.01 * {t}.sum())"
        )
    if d.chance(0.3) and "numpy" not in view:
        d.post.append(f"with torch.no_grad():\n    {t}.mul_(0.95)")


_INCREMENTS = ("{p} + 1", "{p} + 1", "1 + {p}", "max({p}, 0) + 1", "operator.add({p}, 1)")


def counter(d: Draft) -> None:
    """A number that counts calls, and perhaps controls a branch."""
    p = place(d, "0", number=True)
    how = d.rng.random()
    bump = p.put(d.rng.choice(_INCREMENTS).format(p=p.get))
    if how < 0.35 and p.assignable:
        bump = f"{p.get} += 1"
    elif how < 0.5 and p.name and d.form != "module":
        d.pre.append(f"if ({p.name} := {p.name} + 1) > 3:\n    pass")
        bump = ""
    elif how < 0.6 and p.assignable:
        other = d.name("n")
        d.setup.append(f"{other} = [0]")
        bump = f"{p.get} = {other}[0] = {p.get} + 1"
    if bump:
        d.rng.choice((d.pre, d.mid, d.post)).append(bump)
    _use_number(d, p.get)


def _use_number(d: Draft, n: str) -> None:
    """Let the loss depend on the number, in half of the programs."""
    if d.chance(0.5):
        return
    d.mid.append(
        d.pick(
            f"if {n} > 3:\n    loss = loss * 0.5",
            f"if {n} % 3 == 1:\n    loss = loss * 2",
            f"loss = loss * (1 + 0.1 * float({n}))",
            f"loss = loss * (0.5 if {n} < 4 else 1.0)",
            f"loss = loss * [1.0, 0.5, 2.0][int({n}) % 3]",
            f"match int({n}):\n    case 2 | 3:\n        loss = loss * 3\n    case k if k > 6:\n        loss = loss * 0.1\n    case _:\n        pass",
            f"loss = loss * float(f'{{{n}:.1f}}') if {n} else loss"
            if '"' not in n and "'" not in n
            else f"loss = loss + float({n})",
            f"loss = loss * float(str({n})) if {n} else loss",
            f"loss = sum([loss for _ in range(int({n}) % 2 + 1)])",
            f"loss = loss * (lambda k: 2.0 if k > 4 else 1.0)({n})",
            f"loss = loss * {{0: 1.0, 1: 0.5}}.get(int({n}), 0.7)",
            f"try:\n    loss = loss * (1.0, 2.0, 3.0)[int({n})]\nexcept IndexError:\n    loss = loss * 0.3\nfinally:\n    loss = loss + 0",
            f"loss = loss * min({n}, 3.0)",
            f"for _ in range(int(min({n}, 2))):\n    loss = loss * 1.1",
            f"loss = loss + out.sum() * {n} * 0.01",
            f"while True:\n    loss = loss * 1.2\n    if {n} < 5:\n        break\n    loss = loss * 0.9\n    break",
        )
    )


# What a step may compute from the number that it has kept.
_COMPUTED = (
    "{p} * 0.9", "{p} * 0.5 + 0.25", "min(1.0, {p} + 0.1)", "max({p} - 0.15, 0.1)", "1 - 0.9 * {p}", "{p} ** 2 + 0.1",
    "math.cos({p})", "math.sqrt({p} + 1)", "0.5 * (1 + math.cos(math.pi * {p} / 4))", "round({p} * 1.1, 2)", "-{p}",
    "{p} / 2 if {p} > 0.3 else {p} * 3", "np.sqrt(abs({p}) + 1)", "np.float64(0.7) * {p}", "float(np.clip({p}, 0.2, 0.8))",
    "{p} // 0.25 * 0.5 + 0.1", "divmod({p} + 2.7, 0.9)[1]", "sum([{p}, 0.1]) / 2", "(lambda v: v * 0.8)({p})",
    "operator.mul({p}, 0.95)", "{p} % 0.7 + 0.2", "math.pow(0.9, {p})", "float(f'{{{p}:.3f}}') * 0.9 + 0.01",
    "abs({p} - 1) + 0.05", "copy.copy({p}) * 0.9",
)  # fmt: skip
# What it may do with it.
_USES = (
    "loss = loss * (1 + 0.1 * {p})", "loss = loss + {p} * out.mean()", "loss = torch.add(loss, out.sum(), alpha={p})",
    "loss = loss + (out * {p}).mean()", "loss = loss + (out.abs() + 1).pow({p}).mean() * 0.01", "loss = loss / (1 + {p} ** 2)",
    "loss = loss + out.clamp(max={p}).mean()", "loss = loss + torch.lerp(out, y, {p}).mean() * 0.1",
    "loss = loss + torch.full((3,), {p}).sum() * 0.01", "loss = loss + ((out > {p}) * out).sum() * 0.01",
    "loss = loss + F.dropout(out, 0.0 * {p}).sum() * 0.01", "loss = loss * torch.tensor({p})", "loss = {p} - (0.0 - loss)",
    "loss = loss + F.leaky_relu(out, {p}).mean() * 0.1", "loss = loss + torch.where(out > 0, out, {p}).mean() * 0.1",
    "loss = loss + out.masked_fill(out < 0, {p}).mean() * 0.1", "loss = loss + F.smooth_l1_loss(out, y, beta=abs({p}) + 0.1)",
    "if {p} > 0.4:\n    loss = loss * 0.5", "loss = loss * (0.5 if 0.2 < {p} < 0.6 else 1.0)",
    "loss = loss * [1.0, 0.5, 2.0][int({p} * 10) % 3]", "loss = loss + F.layer_norm(out, (3,), eps=abs({p}) + 1e-3).sum() * 0.01",
    "loss = loss + max({p}, 0.3) * out.mean()", "loss = loss + {p} * 2 * torch.ones(2).sum() * 0.01", "pass",
)  # fmt: skip


def computed(d: Draft) -> None:
    """A number that the step computes from the one before: a decay, a schedule, a running value."""
    if "self." in (p := place(d, d.pick("0.5", "0.8", "1.0"), number=True)).get:
        return
    update = p.put(d.rng.choice(_COMPUTED).format(p=p.get))
    d.rng.choice((d.pre, d.mid, d.post)).append(update)
    for _ in range(d.rng.choice((1, 1, 2))):
        d.mid.append(d.rng.choice(_USES).format(p=p.get))
    if d.chance(0.3):
        kept = d.name("log")
        d.setup.append(f"{kept} = []")
        d.post.append(
            d.pick(
                f"{kept}.append({p.get})",
                f"{kept}.append({p.get} * 2)",
                f"{kept}.append(f'{{{p.get}:.3f}}')"
                if '"' not in p.get and "'" not in p.get
                else f"{kept}.append({p.get})",
                f"{kept}.append({{'n': {p.get}, 'type': type({p.get}).__name__}})",
                f"{kept}.append(isinstance({p.get}, float))",
            )
        )
    if d.chance(0.2):
        d.at(p.put(d.pick("0.25", "0.75", "1")).replace("$", ""))


def meter(d: Draft) -> None:
    """Averages of what the step computes, as training scripts keep them."""
    cls, m = d.name("Meter"), d.name("meter")
    d.top.append(
        f"class {cls}:\n    def __init__(self):\n        self.reset()\n\n    def reset(self):\n"
        "        self.val = self.avg = self.sum = self.count = 0\n\n    def update(self, val, n=1):\n"
        "        self.val = val\n        self.sum += val * n\n        self.count += n\n        self.avg = self.sum / self.count"
    )
    d.setup.append(f"{m} = {cls}()")
    d.post.append(
        d.pick(
            f"{m}.update(loss.detach(), x.size(0))",
            f"{m}.update(loss.detach(), len(x))",
            f"{m}.update((out.argmax(1) == y.argmax(1)).to(out).mean())",
            f"{m}.update(len(x))",
            f"{m}.update(0.5, 3)",
        )
    )
    if d.chance(0.4):
        d.at(f"{m}.reset()")
    if d.chance(0.3):
        d.post.append(f"loss = loss.detach() + 0.1 * {m}.avg")


def history(d: Draft) -> None:
    """A dict of lists, or a list of dicts, to which the step appends."""
    h = d.name("hist")
    d.setup.append(d.pick(f"{h} = collections.defaultdict(list)", f"{h} = {{'loss': [], 'k': []}}"))
    d.post.append(
        d.pick(
            f"{h}['loss'].append(loss.detach())",
            f"{h}['loss'].append(loss.detach())\n{h}['k'].append(len(x))",
            f"for key, value in (('loss', loss.detach()), ('k', out.detach().sum())):\n    {h}[key].append(value)",
            f"{h}['loss'].append(loss.detach())\nloss = loss + 0 * len({h}['loss'])",
            f"{h}['loss'].append(loss.detach())\nloss = loss + {h}['loss'][0] * 0.1",
        )
    )
    if d.chance(0.4):
        d.at(f"{h}['loss'].clear()")


def extremum(d: Draft) -> None:
    """Python's max and min of what only the step knows."""
    d.mid.append(
        d.pick(
            "loss = max(loss, loss * 0.5)",
            "loss = loss * min(1.0, 1.0 / (out.norm() + 1e-6))",
            "loss = loss / max(out.detach().abs().max(), 1e-3)",
            "loss = min([loss, loss + 1, loss * 2])",
            "loss = max(0.01, loss)",
        )
    )


def data_edited(d: Draft) -> None:
    """The step edits weights through their `.data`."""
    d.post.append(
        d.pick(
            "$m.z.weight.data *= 0.99",
            "$m.z.weight.data -= 0.01 * $m.z.weight.data.sign()",
            "for p in $m.parameters():\n    p.data -= 0.01 * p.data",
            "$m.z.weight.data /= $m.z.weight.data.norm(dim=1, keepdim=True).clamp(min=1)",
            "$m.z.weight.data[0] *= 0.5",
            "$m.z.weight.data = $m.z.weight.data * 0.98",
        )
    )


def changed_outside(d: Draft) -> None:
    """A number that the loop changes and the step reads."""
    p = place(d, "1", number=True)
    if "self." in p.get:
        return
    _use_number_always(d, p.get)
    put = p.put(d.pick("i % 4", "i", "float(i)", "2 * i", "(i > 4) + 1"))
    for name in d.module:
        if name == p.name:
            put = f"globals()['{name}'] = {put.partition(' = ')[2]}"
    text = put.replace("$", "")
    if d.chance(0.5):
        d.at(text)
        if d.chance(0.5):
            d.at(text)
    else:
        d.each.append(f"if i >= {d.rng.randint(2, 5)}:\n    {text}")


def exchanged(d: Draft) -> None:
    """A number replaced by an equal one, then by others, one of which may be allocated at the first one's address."""
    fresh = d.pick("float('1.%d' % ({}))", "complex('1.%d' % ({})).real", "np.float64('1.%d' % ({}))")
    p = place(d, fresh.format(5), number=True)
    if "self." in p.get:
        return
    _use_number_always(d, p.get)

    def put(number: str) -> str:
        text = p.put(fresh.format(number))
        for name in d.module:
            if name == p.name:
                text = f"globals()['{name}'] = {text.partition(' = ')[2]}"
        return text.replace("$", "")

    others = "\n    ".join(put(d.pick("i", "(i + 3) % 8", "7", "9")) for _ in range(d.rng.randint(2, 3)))
    d.each.append(f"if i % {d.pick(2, 3)}:\n    {put('5')}\nelse:\n    {others}")


def of_kinds(d: Draft) -> None:
    """An object of some kind that the step reads, changed between calls."""
    case, make, read, events = d.pick(*objects.OWN), *(d.name(stem) for stem in ("make", "read", "events"))
    d.setup.append(f"{case.function(make)}\n{read}, {events} = {make}()")
    d.mid.append(f"loss = loss * (1 + 0.01 * {read}())")
    for i in range(len(case.events)):
        d.at(f"{events}[{i}]()", 2 + 2 * i + d.rng.randint(0, 1))


def _use_number_always(d: Draft, n: str) -> None:
    d.mid.append(
        d.pick(
            f"loss = loss * (1 + 0.1 * float({n}))",
            f"if {n} > 2:\n    loss = loss * 0.5",
            f"loss = loss + 0.1 * float({n}) * out.sum()",
            f"loss = loss * float(str({n}))",
            f"loss = loss * (2 if not {n} else 1)",
        )
    )


def advanced(d: Draft) -> None:
    """An iterator or generator that the step advances."""
    s = d.name("it")
    init = d.pick(
        "itertools.count(1)",
        "itertools.cycle([1.0, 0.5, 2.0])",
        "iter([0.5 + 0.1 * k for k in range(20)])",
        "(1 / (k + 1) for k in range(20))",
        "itertools.accumulate(itertools.repeat(1))",
        "iter(range(1, 20))",
        "map(float, range(1, 30))",
        "zip(range(1, 30))",
        "enumerate([1.0] * 20)",
        "iter({k: 1 for k in range(20)}.items())",
        "reversed([0.1 * k for k in range(20)])",
        "itertools.chain([1.0], [2.0], [0.5] * 20)",
    )
    d.setup.append(f"{s} = {init}")
    value = f"next({s})" + ("[0]" if init.startswith(("zip", "enum")) or "items()" in init else "")
    d.mid.append(
        _from_some_call_on(
            d,
            d.pick(
                f"loss = loss * (1 + 0.1 * {value})",
                f"gain = {value}\nloss = loss + gain * 0.01",
                f"{value}",
                f"if {value} > 2:\n    loss = loss * 0.5",
            ),
        )
    )


def _from_some_call_on(d: Draft, lines: str) -> str:
    """`lines`, perhaps from some call on only: nothing that has run until then tells what they take."""
    if d.chance(0.6):
        return lines
    n = d.name("calls")
    d.setup.append(f"{n} = [0]")
    d.post.append(f"{n}[0] += 1")
    condition = d.pick(f"{n}[0] > {d.rng.randint(0, 3)}", f"{n}[0] % {d.rng.randint(2, 4)} == 1", "len(x) == 4")
    return f"if {condition}:\n{textwrap.indent(lines, '    ')}"


def generator(d: Draft) -> None:
    """A generator with state of its own, and perhaps tensors in it."""
    g, f = d.name("gen"), d.name("gf")
    kind = d.pick("numbers", "send", "yields tensor")
    if kind == "numbers":
        d.top.append(f"def {f}():\n    gain = 1.0\n    while True:\n        yield gain\n        gain *= 0.9")
        d.mid.append(_from_some_call_on(d, f"loss = loss * next({g})"))
        d.setup.append(f"{g} = {f}()")
    elif kind == "send":
        d.top.append(
            f"def {f}():\n    total = torch.zeros(3)\n    while True:\n        new = yield total\n        total = total * 0.5 + new"
        )
        d.post.append(f"loss = loss.detach() + {g}.send({d.rng.choice(STATS)}).sum()")
        d.setup.append(f"{g} = {f}()\nnext({g})")
    else:
        d.top.append(f"def {f}(t):\n    for k in range(20):\n        yield t * k")
        d.mid.append(f"loss = loss + 0.01 * (next({g}) * out.mean(0)).sum()")
        d.setup.append(f"{g} = {f}({'torch.ones(3)'})")


def sized(d: Draft) -> None:
    """Objects read by Python's protocols."""
    s = d.name("box")
    cls = s.capitalize()
    methods, use = d.pick(
        ("def __len__(self):\n    return self.k", f"len({s})"),
        ("def __bool__(self):\n    return self.k > 3", f"(2.0 if {s} else 1.0)"),
        ("def __str__(self):\n    return str(self.k)", f"float(str({s}))"),
        ("def __repr__(self):\n    return f'{self.k}'", f"float(f'{{{s}!r}}')"),
        ("def __format__(self, spec):\n    return str(self.k)", f"float(f'{{{s}}}')"),
        ("def __iter__(self):\n    return iter([1.0] * self.k)", f"sum({s})"),
        ("def __contains__(self, k):\n    return k < self.k", f"(2.0 if 3 in {s} else 1.0)"),
        ("def __call__(self):\n    return self.k", f"{s}()"),
        ("def __getitem__(self, k):\n    return self.k", f"{s}['k']"),
        ("def __float__(self):\n    return float(self.k)", f"float({s})"),
        ("def __index__(self):\n    return self.k", f"operator.index({s})"),
        ("def __hash__(self):\n    return self.k", f"hash({s})"),
        ("def __lt__(self, other):\n    return self.k < other", f"(2.0 if {s} < 4 else 1.0)"),
        ("def __add__(self, other):\n    return self.k + other", f"({s} + 1)"),
        ("def __rmul__(self, other):\n    return self.k * other", f"(1.0 * {s})"),
        ("def __eq__(self, other):\n    return self.k == other\n\n__hash__ = None", f"(2.0 if {s} == 4 else 1.0)"),
        ("@functools.cached_property\ndef gain(self):\n    return 1.0 + self.k", f"{s}.gain"),
        ("@property\ndef gain(self):\n    return 1.0 + self.k", f"{s}.gain"),
        ("def __enter__(self):\n    return self.k\n\ndef __exit__(self, *e):\n    self.k += 1", "1.0"),
        ("@classmethod\ndef gain(cls):\n    return cls.g\n\ng = 1.0", f"{s}.gain()"),
        ("@staticmethod\ndef gain(k):\n    return 1.0 + k", f"{s}.gain({s}.k)"),
    )
    d.top.append(f"class {cls}:\n    def __init__(self):\n        self.k = 1\n\n{block(methods, 1)}")
    d.setup.append(f"{s} = {cls}()")
    if "__enter__" in methods:
        d.mid.append(f"with {s} as k:\n    loss = loss * (1 + 0.1 * k)")
        return
    d.mid.append(f"loss = loss * (1 + 0.1 * {use})")
    if d.chance(0.5):
        d.at(f"{s}.k = i")
        if d.chance(0.4):
            d.at(f"{s}.k += 2")
    else:
        d.post.append(f"{s}.k += 1")
    if "cls.g" in methods:
        d.at(f"{cls}.g = 0.5")


def called(d: Draft) -> None:
    """Functions whose parts change between steps."""
    f = d.name("f")
    kind = d.pick(
        "defaults",
        "kwdefaults",
        "code",
        "global",
        "partial",
        "dispatch",
        "cache",
        "closure",
        "attribute",
        "list",
        "table",
        "decorated",
        "method",
        "static",
    )
    if kind == "defaults":
        d.setup.append(f"def {f}(t, k=1.0):\n    return t * k")
        d.at(f"{f}.__defaults__ = (0.5,)")
    elif kind == "kwdefaults":
        d.setup.append(f"def {f}(t, *, k=1.0):\n    return t * k")
        d.at(f"{f}.__kwdefaults__['k'] = 0.5")
    elif kind == "code":
        d.setup.append(f"def {f}(t):\n    return t * 2")
        d.at(f"{f}.__code__ = (lambda t: t * 0.5).__code__")
    elif kind == "global":
        d.top.append(f"def {f}(t):\n    return t * 2")
        d.at(f"globals()['{f}'] = lambda t: t * 0.5")
        d.names.remove(f)
    elif kind == "partial":
        d.setup.append(
            f"{f} = functools.partial(torch.mul, other=2.0)"
            if False
            else f"{f} = functools.partial(lambda t, k: t * k, k=2.0)"
        )
        d.at(f"{f}.keywords['k'] = 0.5")
    elif kind == "dispatch":
        d.setup.append(f"@functools.singledispatch\ndef {f}(t):\n    return t * 2")
        d.at(f"{f}.register(torch.Tensor, lambda t: t * 0.5)")
    elif kind == "cache":
        s = d.name("s")
        d.setup.append(
            f"{s} = [2.0]\n@functools.lru_cache\ndef gain{f}():\n    return {s}[0]\ndef {f}(t):\n    return t * gain{f}()"
        )
        d.at(f"{s}[0] = 0.5")
        if d.chance(0.6):
            d.at(f"gain{f}.cache_clear()")
    elif kind == "closure":
        s = d.name("k")
        d.setup.append(f"{s} = 2.0\ndef {f}(t):\n    return t * {s}")
        d.at(f"{s} = 0.5")
    elif kind == "attribute":
        d.setup.append(f"def {f}(t):\n    return t * getattr({f}, 'gain', 1.0)")
        d.at(f"{f}.gain = 0.5")
    elif kind == "list":
        fs = d.name("fs")
        d.setup.append(
            f"{fs} = [torch.abs, torch.square]\ndef {f}(t):\n    for g in {fs}:\n        t = g(t)\n    return t"
        )
        d.at(d.pick(f"{fs}.append(torch.tanh)", f"{fs}.pop()", f"{fs}[0] = torch.exp"))
    elif kind == "table":
        fs = d.name("fs")
        d.setup.append(f"{fs} = {{'f': torch.tanh, 'k': 'f'}}\ndef {f}(t):\n    return {fs}[{fs}['k']](t)")
        d.at(f"{fs}.update(g=torch.exp, k='g')")
    elif kind == "decorated":
        s = d.name("k")
        d.setup.append(
            f"{s} = [1.0]\ndef deco{f}(g):\n    @functools.wraps(g)\n    def inner(t):\n        return g(t) * {s}[0]\n    return inner\n"
            f"@deco{f}\ndef {f}(t):\n    return t * 2"
        )
        d.at(f"{s}[0] = 0.5")
    elif kind == "method":
        d.top.append(f"class {f.capitalize()}:\n    k = 2.0\n\n    def call(self, t):\n        return t * self.k")
        d.setup.append(f"owner{f} = {f.capitalize()}()\n{f} = owner{f}.call")
        d.at(
            d.pick(
                f"owner{f}.k = 0.5",
                f"{f.capitalize()}.k = 0.5",
                f"{f.capitalize()}.call = lambda self, t: t",
                f"{f} = lambda t: t * 0.1",
            )
        )
    else:
        d.top.append(
            f"class {f.capitalize()}:\n    k = 2.0\n\n    @staticmethod\n    def call(t):\n        return t * {f.capitalize()}.k"
        )
        d.setup.append(f"{f} = {f.capitalize()}.call")
        d.at(f"{f.capitalize()}.k = 0.5")
    d.mid.append(f"loss = {f}(loss)")


def grown(d: Draft) -> None:
    """A collection of plain values that grows and is perhaps read."""
    s = d.name("seen")
    init, add, read = d.pick(
        ("set()", f"{s}.add(len({s}))", f"len({s})"),
        ("[]", f"{s}.append(len({s}))", f"sum({s})"),
        ("{}", f"{s}[len({s})] = 'x'", f"len({s})"),
        ("collections.Counter()", f"{s}['calls'] += 1", f"{s}['calls']"),
        ("collections.defaultdict(int)", f"{s}['calls'] += 1", f"{s}['calls']"),
        ("[3, 1]", f"heapq.heappush({s}, len({s}))", f"{s}[0]"),
        ("['a']", f"{s}.append({s}[-1] + 'b')", f"len({s}[-1])"),
        ("bytearray()", f"{s}.append(1)", f"len({s})"),
        ("io.StringIO()", f"{s}.write('ab')", f"{s}.tell()"),
        ("collections.deque([1, 2, 3])", f"{s}.rotate(1)", f"{s}[0]"),
        ("collections.OrderedDict(a=1, b=2, c=3)", f"{s}.move_to_end(next(iter({s})))", f"next(iter({s}.values()))"),
        ("[1, 2, 3]", f"{s}.append({s}.pop(0))", f"{s}[0]"),
        ("{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}", f"{s}.pop()", f"len({s})"),
        ("set('abcdefghijk')", f"{s}.pop()", f"ord(next(iter({s})))"),
        ("set('abcdefghijk') - set('bcde')", f"{s}.add({s}.pop())", f"ord(next(iter({s})))"),
        ("[5, 4, 3, 2, 1, 0, 1, 2, 3, 4]", f"{s}.pop()", f"{s}[-1]"),
    )
    d.setup.append(f"{s} = {init}")
    d.rng.choice((d.pre, d.post)).append(add)
    if d.chance(0.4):
        d.mid.append(d.pick(f"loss = loss * (1 + 0.1 * {read})", f"if {read} > 3:\n    loss = loss * 0.5"))


def looked_up(d: Draft) -> None:
    """Settings read in the step in less common ways, and changed between steps."""
    s = d.name("cfg")
    init, read, change = d.pick(
        ("types.SimpleNamespace(a=1.0, b=2.0)", f"sum(vars({s}).values())", f"{s}.a = 3.0"),
        ("types.SimpleNamespace(a=1.0)", f"getattr({s}, 'k', 1.0)", f"{s}.k = 0.5"),
        ("types.SimpleNamespace(a=1.0)", f"(2.0 if hasattr({s}, 'k') else 1.0)", f"{s}.k = 0.5"),
        ("types.SimpleNamespace(a=1.0)", f"{s}.__dict__.get('k', 1.0)", f"{s}.k = 0.5"),
        ("types.SimpleNamespace(a=1.0, k=0.5)", f"len(dir({s}))", f"del {s}.k"),
        ("{'a': 1.0}", f"{s}.get('k', 1.0)", f"{s}['k'] = 0.5"),
        ("{'a': 1.0, 'k': 0.2}", f"(2.0 if 'k' in {s} else 1.0)", f"del {s}['k']"),
        ("collections.OrderedDict(a=1.0, b=2.0, c=3.0)", f"next(iter({s}.values()))", f"{s}.move_to_end('a')"),
        ("dict(a=1.0, b=2.0)", f"next(iter({s}.values()))", f"{s}['a'] = {s}.pop('a')"),
        ("dict(a=1.0, b=2.0)", f"list({s}.values())[-1]", f"{s}['c'] = 0.3"),
        ("collections.ChainMap({}, {'k': 1.0})", f"{s}['k']", f"{s}.maps[0]['k'] = 0.5"),
        ("collections.ChainMap({'k': 1.0}, {'k': 3.0})", f"{s}['k']", f"{s}.maps.reverse()"),
        ("types.SimpleNamespace(v=1.0)", f"operator.attrgetter('v')({s})", f"{s}.v = 0.5"),
        ("[1.0, 2.0]", f"operator.itemgetter(1)({s})", f"{s}[1] = 0.5"),
        ("[1.0, 2.0]", f"functools.reduce(operator.mul, {s})", f"{s}.append(0.5)"),
        ("np.ones(3)", f"float({s}.sum())", f"{s}[1] = 4"),
        ("np.ones((2, 2))[1]", f"float({s}[0])", f"{s}.base[1, 0] = 4"),
        ("np.arange(3.0)", f"{s}.mean()", f"{s} *= 2" if d.form != "module" else f"{s}[:] = 2"),
        ("bytearray(b'ab')", f"{s}[0] / 97", f"{s}[0] = 120"),
        ("array.array('d', [1.0])", f"{s}[0]", f"{s}[0] = 0.5"),
        ("string.Template('$k')", f"float({s}.substitute(k=2))", f"{s}.template = '3'"),
        ("io.StringIO('7')", f"float({s}.getvalue())", f"{s}.write('9')"),
        ("weakref.WeakValueDictionary()", f"(1.0 + len({s}))", f"{s}['m'] = m"),
        ("weakref.WeakSet()", f"(1.0 + len({s}))", f"{s}.add(m)"),
        ("slice(0, 2)", f"float(len([1, 2, 3][{s}]))", f"{s} = slice(0, 3)"),
        ("'%d'", f"float({s} % 3)", f"{s} = '1%d'"),
        ("frozenset([1, 2])", f"float(len({s}))", f"{s} = frozenset([1])"),
        ("(1.0, 2.0)", f"max({s})", f"{s} = (3.0, 4.0)"),
        ("threading.Event()", f"(2.0 if {s}.is_set() else 1.0)", f"{s}.set()"),
        ("math.pi", f"{s}", f"{s} = math.e"),
        ("[[1.0], [2.0]]", f"sum(v for row in {s} for v in row)", f"{s}[1][0] = 5.0"),
        ("[[1.0], [2.0]]", f"{s}[0][0]", f"{s}.reverse()"),
        ("{'a': [1.0]}", f"sum(map(sum, {s}.values()))", f"{s}['a'].append(1.0)"),
    )
    d.setup.append(f"{s} = {init}")
    d.mid.append(f"loss = loss * (1 + 0.1 * {read})")
    d.at(change)


def tensors_outside(d: Draft) -> None:
    """Tensors and arrays of the caller's, read by the step and edited or replaced by the loop."""
    s = d.name("w")
    init = d.pick(
        "torch.ones(3)",
        "base[1:4]",
        "torch.from_numpy(table)",
        "torch.ones(3, 2).t()[0]",
        "[torch.ones(3)]",
        "{'w': torch.ones(3)}",
        "(torch.ones(3), 1)",
    )
    _outside(d, init)
    d.setup.append(f"{s} = {init}")
    read = {"[": f"{s}[0]", "{": f"{s}['w']", "(": f"{s}[0]"}.get(init[0], s)
    d.mid.append(f"loss = loss + 0.1 * ({read} * out.mean(0)).sum()")
    edits = [
        f"{read}.mul_(2)",
        f"{read}[0] = 3.0",
        f"{read}.data = torch.zeros(3)",
        f"{read}.copy_(torch.arange(3.0))",
        f"{read}.detach().numpy()[1] = 4.0",
    ]
    if init[0] != "(":
        edits += [f"{read} = torch.full((3,), 0.5)", f"{read} = {read} * 2"]
    if "base" in init:
        edits += ["base.mul_(3)", "base[2] = 1.0"]
    if "table" in init:
        edits += ["table *= 2", "table[0] = 5"]
    d.at(d.rng.choice(edits))
    if d.chance(0.5):
        d.at(d.rng.choice(edits))


def other_memory(d: Draft) -> None:
    """Kept tensors that come to share memory or change shape, between two steps or in one."""
    k = place(d, "torch.zeros(3)").get
    q = d.pick(place(d, "torch.arange(3.0)").get, "$m.z.bias")
    d.setup.append("lent = torch.arange(3.0) / 6")
    _outside(d, "lent")
    write = d.pick(f"{k}.add_(out.detach().mean(0))", f"{k}.mul_(0.5)", f"{k}[0] += 1.0", f"{k}.sub_(out.detach()[0])")
    d.mid.append(f"with torch.no_grad():\n    {write}")
    d.mid.append(f"loss = loss + 0.1 * ({k}.sum() + 2 * {q}.detach().sum()){d.pick('', ' * lent.sum()')}")
    between = (
        f"{k}.data = {q}.data",
        f"{k}.data = {q}.detach()",
        f"{k}.data = {k}.data * 2",
        f"{k}.data = lent",
        f"{k}.data = lent[:3].clone()",
        f"{k}.set_({q}.detach())",
        f"{k}.resize_(2, 2).zero_()\n{k}.resize_(3)",
        f"torch.utils.swap_tensors({k}, lent)",
        f"{k}.untyped_storage().resize_(64)",
        f"{k}.untyped_storage().fill_(0)",
    )
    for _ in range(d.pick(1, 1, 2)):
        d.at(d.rng.choice(between).replace("$m", "m"))
    if d.chance(0.3):
        weight_memory, other = "torch.from_numpy(m.z.bias.detach().numpy())", "torch.arange(3.0) / 5"
        lies = place(d, d.pick(weight_memory, other))
        d.mid.append(f"loss = loss + 0.1 * ({lies.get} * y.mean(0)).sum()")
        d.at(lies.put(d.pick(weight_memory, other, "m.z.bias.detach()")))


def conjugated(d: Draft) -> None:
    """A kept complex tensor and conjugated views of it, created before or in the step, any of which may be written."""
    s = place(d, "torch.complex(torch.arange(3.0), torch.ones(3)) / 3")
    d.mid.append(f"mirror = {d.pick(f'{s.get}.conj()', f'{s.get}.conj()[1:]', f'{s.get}.conj().imag', f'{s.get}.mH')}")
    write = d.pick(
        f"{s.get}.mul_(0.9j)",
        "mirror.mul_(0.8)",
        f"{s.get}[0] += 0.1",
        "mirror[-1] = 0.2",
        f"{s.get}.conj().add_(0.1j)",
    )
    when = d.pick("before", "after", "never")
    if when == "before":
        d.mid.append(f"with torch.no_grad():\n    {write}")
    d.mid.append(f"loss = loss + 0.1 * mirror.abs().sum() + 0.05 * {s.get}.imag.sum()")
    if when == "after":
        d.mid.append(f"with torch.no_grad():\n    {write}")
    if d.chance(0.4):
        d.mid.append(
            s.put(
                d.pick(f"{s.get}.conj()", "(out.detach().sum() * torch.ones(3)).conj() * 0.1j", f"{s.get}.conj() * 1")
            )
        )
    if d.chance(0.5):
        kept = place(d, "torch.zeros(3, dtype=torch.complex64)")
        d.mid.append(kept.put("mirror.detach()"))
        d.at(d.pick(f"{kept.get}.mul_(1.1)", f"{s.get}.mul_(0.9j)"))
    if d.chance(0.5):
        d.at(d.pick(f"{s.get}.conj().mul_(0.9)", f"{s.get} += 0.1j" if s.get.isidentifier() else f"{s.get}.add_(0.1j)"))


def drawn(d: Draft) -> None:
    """Random numbers of Python's or NumPy's, drawn at each step (or refused)."""
    d.mid.append(
        d.pick(
            "loss = loss * (1 + random.random())",
            "loss = loss * float(1 + np.random.rand())",
            "if random.random() < 0.5:\n    loss = loss * 2",
        )
    )


_READ = (
    "loss.item()",
    "loss.item()",
    "loss.detach().item()",
    "float(loss.detach())",
    "out.detach().mean().item()",
    "out.detach().abs().max().item()",
    "out.argmax().item()",
    "y.sum().item()",
    "int(out.detach().abs().sum() * 10)",
    "$m.z.weight.detach().norm().item()",
    "(out.detach() > 0).sum().item()",
    "out.detach()[0].tolist()[1]",
    "max(out.detach()[0].tolist())",
    "float(out.detach().numpy().max())",
    "round(loss.item(), 3)",
    "math.sqrt(abs(loss.item()))",
    "np.sqrt(np.abs(loss.item()))",
    "abs(loss.item()) ** 0.5",
    "len(out.detach()[out.detach() > 0])",
    "len(torch.unique(out.detach() > 0))",
    "out.detach().relu().nonzero().shape[0]",
    "min(1.0, 0.5 / (abs(loss.item()) + 1e-6))",
)
_PREDICATES = (
    "loss > 0.4",
    "loss.isfinite()",
    "not torch.isnan(loss).any()",
    "(out.detach() > 0.3).any()",
    "loss.item() > 0.3",
    "math.isfinite(loss.item())",
    "out.detach().sum() > y.sum()",
    "torch.equal(out, out + 0)",
    "0 < loss.item() < 1.5",
    "(out.detach().abs() < 2).all() and loss.item() < 3",
    "$m.z.weight.detach().sum().item() > 0",
)


def reads(d: Draft) -> None:
    """Values that the step computes, and reads in Python."""
    for _ in range(d.pick(1, 1, 2)):
        kind = d.pick("kept", "kept", "total", "returned", "loss", "branch", "branch", "other", "other")
        place_of, number = d.pick(d.mid, d.mid, d.post), d.rng.choice(_READ)
        if kind == "kept":
            kept = d.name("log")
            d.setup.append(f"{kept} = []")
            place_of.append(f"{kept}.append({d.pick(number, number, f'({number}, 1)', f'[{number}]')})")
        elif kind == "total":
            p = place(d, "0.0")
            place_of.append(p.put(f"{p.get} + {number}"))
        elif kind == "returned":
            v = d.name("v")
            d.names.remove(v)
            place_of.append(f"{v} = {number}")
            d.results.append(d.pick(v, f"{v} * 2", f"[{v}]", f"f'{{{v}:.3f}}'"))
        elif kind == "loss":
            d.mid.append(d.pick(f"loss = loss * (1 + 0.1 * {number})", f"loss = loss + 0.01 * {number} * out.mean()"))
        elif kind == "branch":
            predicate, n = d.rng.choice(_PREDICATES), d.name("k")
            d.setup.append(f"{n} = [0]")
            then = d.pick(
                f"{n}[0] += 1", f"{n}.append(1)", "loss = loss * 0.5", "@early" if place_of is d.mid else "pass"
            )
            place_of.append(f"if {predicate}:\n    {then}")
        else:
            kept = d.name("log")
            d.setup.append(f"{kept} = []\n{kept}_file = types.SimpleNamespace(write={kept}.append)")
            place_of.append(
                d.pick(
                    f"print(f'{{loss:.3f}} of {{len(x)}}', file={kept}_file)",
                    f"print('loss', f'{{loss.item():>9.4f}}', end=f'{{out.detach().mean().item():.2f}}', file={kept}_file)",
                    f"{kept}.append(out.detach()[out.detach() > 0])",
                    f"{kept}.append(torch.where(out.detach() > 0))",
                    f"{kept}.append(f'{{loss.item():.3f}}')",
                    f"{kept}.append(out.detach().tolist())",
                    f"{kept}.append(out.detach().numpy().copy())",
                    f"n, t = 0, out.detach()\nwhile t.abs().max() > 0.2 and n < 5:\n    n, t = n + 1, t * 0.5\n{kept}.append(n)",
                    f"{kept}.extend(out.detach().sum(0).tolist())",
                    f"{kept}.append([r.item() for r in out.detach()[0]])",
                )
            )
    if d.chance(0.2):
        d.grads.append(
            d.pick(
                "scale = min(1.0, 0.5 / ($m.z.weight.grad.norm().item() + 1e-6))\nfor p in $m.parameters():\n    p.grad.mul_(scale)",
                "if not all(p.grad.isfinite().all() for p in $m.parameters()):\n    raise ValueError('a gradient')",
                "for p in $m.parameters():\n    if p.grad.abs().max() > 0.2:\n        p.grad.mul_(0.5)",
            )
        )
    if d.chance(0.1):
        d.post.append("$o.param_groups[0]['lr'] = 0.1 / (1 + abs(loss.item()))")


def argument_edited(d: Draft) -> None:
    """The batch edited in place."""
    d.pre.append(d.pick("y.mul_(0.5)", "y[0] = 0.0", "y.t()[1].add_(0.1)", "x.mul_(1)", "y.clamp_(-1, 1)"))


def closed_over(d: Draft) -> None:
    """A step closure with values."""
    s = d.name("log")
    d.setup.append(f"{s} = []\n@fl.step_closure\ndef note{s}(v):\n    {s}.append(float(v))")
    d.names.append(f"note{s}")
    d.post.append(f"note{s}(loss)")


def leaf(d: Draft) -> None:
    """A kept tensor with requires_grad, recreated at each step."""
    p = place(d, "torch.zeros(3).requires_grad_()")
    d.mid.append(f"loss = loss + 0.1 * ({p.get} * out.mean(0)).sum()")
    new = d.pick(
        f"({p.get} - 0.1 * {p.get}.grad).detach().requires_grad_()",
        f"({p.get}.detach() * 0.5 + {p.get}.grad).requires_grad_()",
        "torch.ones(3).requires_grad_()",
    )
    if d.chance(0.7):
        d.post.append(p.put(new))
    else:
        d.post.append(f"with torch.no_grad():\n    {p.get}.sub_(0.1 * {p.get}.grad)\n{p.get}.grad = None")


def second_gradient(d: Draft) -> None:
    """Gradients computed in the forward pass, and kept."""
    kept = d.name("gs")
    weight = "$m.z.weight"
    d.setup.append(f"{kept} = []")
    if d.chance(0.6):
        d.mid.append(
            f"grad, = torch.autograd.grad(out.square().sum(), {weight}, create_graph=True)\n"
            f"loss = loss + 0.01 * grad.pow(2).sum()"
        )
    else:
        d.mid.append(f"grad, = torch.autograd.grad(loss, {weight}, retain_graph=True)")
    if d.chance(0.6):
        d.post.append(f"{kept}.append(grad.detach())")


def weights_in_step(d: Draft) -> None:
    """The step edits or replaces weights without the optimizer."""
    n = d.name("k")
    d.setup.append(f"{n} = [0]")
    d.post.append(
        d.pick(
            "with torch.no_grad():\n    $m.z.weight.clamp_(-0.4, 0.4)",
            "$m.z.weight.data.mul_(0.99)",
            "$m.z.weight.data = $m.z.weight.data * 0.99",
            "with torch.no_grad():\n    $m.z.weight[0] = 0.1",
            "with torch.no_grad():\n    $m.z.weight.copy_($m.z.weight / $m.z.weight.norm())",
            "with torch.no_grad():\n    for p in $m.parameters():\n        p.mul_(0.99)",
            f"{n}[0] += 1\nif {n}[0] == 4:\n    with torch.no_grad():\n        $m.z.weight.zero_()",
            f"{n}[0] += 1\nif {n}[0] == 4:\n    $m.z.weight = nn.Parameter(torch.full((3, 5), 0.1))",
            "$m.load_state_dict({k: v * 0.99 for k, v in $m.state_dict().items()})",
            "nn.init.constant_($m.z.bias, 0.1) if $m.z.bias is not None else None",
        )
    )


def model_in_step(d: Draft) -> None:
    """The step changes the model's modes, hooks and attributes."""
    n = d.name("k")
    d.setup.append(f"{n} = [0]")
    before, after = d.pick(
        ("$m.train()", "$m.eval()"),
        ("$m.eval()", "$m.train()"),
        ("handle = $m.act.register_forward_hook(lambda mod, args, out: out * 0.5)", "handle.remove()"),
        (f"handle = $m.act.register_forward_hook(lambda mod, args, out: {n}.append(out.detach()))", "handle.remove()"),
        (f"{n}[0] += 1\n$m.step_number = {n}[0]", ""),
        (f"{n}[0] += 1\nif {n}[0] == 4:\n    $m.z.requires_grad_(False)", ""),
        (f"{n}[0] += 1\nif {n}[0] == 3:\n    $m.act = nn.Sigmoid()", ""),
        (f"{n}[0] += 1\n$m.z.weight.requires_grad_({n}[0] % 2 == 0)", ""),
        (f"{n}[0] += 1\nif {n}[0] == 3:\n    $m.act.register_forward_hook(lambda mod, args, out: out * 0.5)", ""),
        ("hook = $m.z.weight.register_hook(lambda g: g * 0.5)", "hook.remove()"),
        ("out_hook = []", "out_hook.append($m.z.weight.grad)"),
        (f"torch.set_grad_enabled(True)\n{n}.append(len({n}))", ""),
    )
    d.pre.append(before)
    if after:
        d.post.append(after)


def groups_in_step(d: Draft) -> None:
    """The step sets the optimizer's hyperparameters."""
    n = d.name("k")
    d.setup.append(f"{n} = [0]")
    d.pre.append(
        f"{n}[0] += 1\n"
        + d.pick(
            f"for group in $o.param_groups:\n    group['lr'] = 0.1 / {n}[0]",
            f"if {n}[0] == 4:\n    $o.param_groups[0]['lr'] = 0.02",
            f"if {n}[0] == 4:\n    for group in $o.param_groups:\n        group['weight_decay'] = 0.1",
            f"if {n}[0] == 4:\n    $o.state.clear()",
            "rate = $o.param_groups[0]['lr'] * 1.0",
            "for group in $o.param_groups:\n    group['lr'] *= 0.9",
            "for group in $o.param_groups:\n    group['lr'] = max(float(group['lr']) * 0.9, 0.02)",
            "for group in $o.param_groups:\n    group['calls'] = group.get('calls', 0) + 1",
            "for group in $o.param_groups:\n    group['lr'] = float(np.float64(0.1) * 0.9 ** $n[0])".replace("$n", n),
        )
    )
    if d.chance(0.4):
        rates = d.name("rates")
        d.setup.append(f"{rates} = []")
        d.post.append(
            d.pick(
                f"{rates}.append($o.param_groups[0]['lr'])",
                f"{rates}.append({{'lr': $o.param_groups[0]['lr'], 'wd': $o.param_groups[0].get('weight_decay')}})",
                f"{rates}.append(f'{{$o.param_groups[0][\"lr\"]:.2e}}')",
                "$o.param_groups[0]['lr'] *= 0.95",
                f"{rates}.append($o.param_groups[0]['lr'] * 2)",
            )
        )
    if d.chance(0.2):
        d.each.append(
            d.pick("o.param_groups[0]['lr'] = np.float32(0.1 / (i + 1))", "o.param_groups[0]['lr'] = 0.1 / (i + 1)")
        )


def evaluated(d: Draft) -> None:
    """The model is evaluated between two steps."""
    v = d.name("val")
    d.setup.append(f"{v} = []")
    mode = d.pick("torch.inference_mode()", "torch.inference_mode()", "torch.no_grad()")
    text = d.pick(
        f"{v}.append(m(x).sum())",
        f"{v}.append((x @ torch.ones(4, 5) @ m.z.weight.t()).sum())",
        f"{v}.append(m.z.weight[0].sum())",
        f"{v}.append(m.z.weight.to(torch.float64).sum())",
        f"{v}.extend(w.detach().clone() for w in m.state_dict().values())",
    )
    d.after.append(f"with {mode}:\n    {text}")


def skipped(d: Draft) -> None:
    """Some calls end early, by Python or by an error that the loop catches."""
    n = d.name("k")
    d.setup.append(f"{n} = [0]")
    if d.chance(0.5):
        d.pre.append(f"{n}[0] += 1\nif {n}[0] in (3, 6):\n    raise BadBatch('of call', {n}[0])")
        d.catches = True
        d.top.append("class BadBatch(Exception):\n    pass")
    else:
        d.mid.append(f"{n}[0] += 1\nif {n}[0] % 4 == 0:\n    @early")


def returned(d: Draft) -> None:
    """What the step keeps is also returned, as the same object."""
    p = place(d, _initial(d))
    d.post.append(p.put(f"{p.get} * 0.5 + {d.rng.choice(STATS)}"))
    d.results.append(d.pick(p.get, f"{{'h': {p.get}, 'n': 1}}", f"[{p.get}, {p.get}]", f"({p.get}, out.detach())"))
    _use(d, p)
    if d.chance(0.5):
        kept = d.name("all")
        d.setup.append(f"{kept} = []")
        d.after.append(f"{kept}.append(result)")


def returned_plain(d: Draft) -> None:
    """Other results: weights, gradients, arguments, numbers, objects."""
    n = d.name("k")
    d.setup.append(f"{n} = [0]")
    result = d.pick(
        "$m.z.weight", "$m.z.weight.detach()", "$m.z.weight.grad", "x", "y[0]", f"{n}", f"{n}[0]", "'text'", "None", "$m",
        "$m.z.weight.detach().t()", "list($m.parameters())", "dict($m.named_parameters())", "$m.state_dict()", "out", "loss",
        "types.SimpleNamespace(out=out.detach())", "(out.detach(),) * 2", "{'a': [out.detach()[0], y]}", "(i for i in range(3))",
    )  # fmt: skip
    d.post.append(f"{n}[0] += 1")
    d.results.append(result)
    kept = d.name("all")
    d.setup.append(f"{kept} = []")
    d.after.append(f"{kept}.append(result)")


def arrays(d: Draft) -> None:
    """NumPy arrays that the step edits, reads or grows."""
    s = d.name("arr")
    d.setup.append(f"{s} = np.zeros(3)")
    d.pre.append(
        d.pick(
            f"{s}[0] += 1", f"{s}[:] = {s} * 0.5 + 1", f"np.add({s}, 1, out={s})", f"{s}.fill(2.0)", f"{s}[1:] -= 0.5"
        )
    )
    if d.chance(0.6):
        d.mid.append(
            d.pick(
                f"loss = loss * float(1 + 0.1 * {s}.sum())",
                f"loss = loss + 0.1 * (torch.from_numpy({s}).to(out.dtype) * out.mean(0)).sum()",
                f"loss = loss + 0.1 * (torch.as_tensor({s}.copy(), dtype=out.dtype) * out.mean(0)).sum()",
                f"if {s}[0] > 2:\n    loss = loss * 0.5",
            )
        )


def second_step(d: Draft) -> None:
    """Another traced step on the same model, called now and then."""
    f, kept = d.name("other"), d.name("seen")
    body = d.pick(
        "with torch.no_grad():\n    return c(x).mean(0)",
        "m.eval()\nwith torch.no_grad():\n    v = c(x).mean()\nm.train()\nreturn v",
        "v = (c(x) ** 2).mean()\nv.backward()\no.step()\no.zero_grad()\nreturn v",
        "v = (c(x) ** 2).mean()\nv.backward()\nreturn v",
        f"{kept}.append(c(x).detach().mean(0))\nreturn {kept}[-1]",
        "with torch.no_grad():\n    for p in m.parameters():\n        p.mul_(0.9)\n    return m.z.weight.sum()",
    )
    d.setup.append(f"{kept} = []\n@fl.trace\ndef {f}(x):\n{block(body, 1)}")
    d.each.append(
        d.pick(
            f"if i % 2:\n    {kept}.append({f}(x))",
            f"{kept}.append({f}(x))",
            f"if i in (3, 5):\n    {kept}.append({f}(x).detach().clone())",
        )
    )


def held_objects(d: Draft) -> None:
    """Objects recreated at each step, with tensors in them, that replace each other or form a chain."""
    s = d.name("State")
    d.names.remove(s)
    stat = d.rng.choice(STATS)
    d.top.append(
        d.pick(
            f"@dataclasses.dataclass\nclass {s}:\n    h: object\n    old: object = None",
            f"class {s}:\n    __slots__ = ('h', 'old')\n\n    def __init__(self, h, old=None):\n        self.h = h\n        self.old = old",
            f"class {s}:\n    def __init__(self, h, old=None):\n        self.h, self.old = h, old",
            f"{s} = collections.namedtuple('{s}', 'h old', defaults=[None])",
        )
    )
    p = place(d, f"{s}({_initial(d)})")
    old = d.pick("None", p.get, f"{p.get}.h", f"{p.get}.old")
    d.post.append(p.put(f"{s}({p.get}.h * 0.5 + {stat}, {old})"))
    if d.chance(0.5):
        d.mid.append(f"loss = loss + 0.1 * ({p.get}.h * out.mean(0)).sum()")


def outside(d: Draft) -> None:
    """A number outside Python's objects, or without a name: it is read in the step, and replaced between steps and
    perhaps by the step."""
    k = d.name("out")
    d.names.remove(k)
    file, module, object_ = f"path{k}", f"of{k}", f"kept{k}"
    # The same in both runs, and empty at first.
    folder = (
        f"{k} = os.path.join(tempfile.gettempdir(), 'firstloss-fuzz-%d' % os.getpid(), '{k}')\n"
        f"shutil.rmtree({k}, ignore_errors=True)\nos.makedirs({k})"
    )
    setup, get, put = d.pick(
        (
            f"{folder}\n{file} = pathlib.Path({k}) / 'number'",
            d.pick(f"float({file}.read_text())", f"float(open({file}).read())", f"float(next(open({file})))"),
            f"{file}.write_text(str({{}}))",
        ),
        (
            f"{folder}\n{file} = os.path.join({k}, 'number.pt')",
            f"torch.load({file})",
            f"torch.save(torch.tensor(float({{}})), {file})",
        ),
        (
            f"{folder}\n{file} = pathlib.Path({k})",
            d.pick(f"(0.1 * len(os.listdir({file})))", f"(0.5 if os.path.exists({file} / 'a') else 0.2)"),
            f"({file} / d_name({{}})).touch()",
        ),
        (
            f"sys.modules['fuzzed_{module}'] = {module} = types.ModuleType('fuzzed_{module}')",
            d.pick(f"sys.modules['fuzzed_{module}'].number", f"__import__('fuzzed_{module}').number"),
            f"{module}.number = {{}}",
        ),
        (
            f"{object_} = [types.SimpleNamespace(number=0.5)]\n{k} = weakref.ref({object_}[0])",
            f"({k}().number if {k}() is not None else 0.1)",
            d.pick(f"{object_}[0].number = {{}}", f"{object_}[0] = types.SimpleNamespace(number={{}})"),
        ),
        (
            f"{object_} = {{'number': 0.5}}\n{k} = {object_}.get",
            f"{k}('number')",
            f"{object_}['number'] = {{}}",
        ),
        (f"{object_} = [0.5]\n{k} = {object_}.__getitem__", f"{k}(0)", f"{object_}[0] = {{}}"),
        (
            f"{k} = os.getcwd()",
            f"(0.3 if os.getcwd() == {k} else 0.1)",
            f"os.chdir(tempfile.gettempdir() if {{}} > 0.5 else {k})",
        ),
    )
    if "d_name" in put:
        put = put.replace("d_name({})", f"'{d.pick('a', 'b')}'")
    d.setup.append(setup)
    if "getcwd" not in setup:
        d.setup.append(put.format(0.5))
    d.mid.append(f"loss = loss + 0.1 * {get} * out.mean()")
    d.at(put.format(d.rng.randint(1, 9) / 10))
    if d.chance(0.3):
        d.at(put.format(d.rng.randint(1, 9) / 10))
    if d.chance(0.2):
        d.post.append(put.format(0.7))


def stored(d: Draft) -> None:
    """Something that the step sets, mostly to its current value, and that others set differently between steps."""
    k, seen, cls = d.name("kept"), d.name("seen"), d.name("Stored")
    d.names.remove(cls)
    ones, twos, threes = d.pick(("1.0", "2.0", "3.0"), ("True", "False", "None"), ("'a'", "'b'", "'c'"))
    attribute = (f"{k}.value = {{}}", f"{k}.value")
    named = (d.pick(f"setattr({k}, 'value', {{}})", f"object.__setattr__({k}, 'value', {{}})"), f"{k}.value")
    setup, (put, get) = d.pick(
        (f"{k} = types.SimpleNamespace(value={ones})", attribute),
        (f"{k} = {cls}()", attribute),
        (f"{k} = {cls}()", attribute),
        (f"{k} = {cls}()", named),
        (f"{k} = {cls}()", (f"vars({k})['value'] = {{}}", f"{k}.value")),
        (f"{k} = {cls}()", (f"{cls}.value = {{}}", f"{k}.value")),
        (f"{k} = {cls}()", (f"{k}.shown = {{}}", f"{k}.value")),
        (f"{k} = nn.ReLU()\n{k}.value = {ones}", attribute),
        (f"{k} = torch.ones(2)\n{k}.value = {ones}", attribute),
        (f"{k} = {cls}\n{k}.value = {ones}", attribute),
        (f"{k} = types.ModuleType('stored')\n{k}.value = {ones}", attribute),
        (f"{k} = functools.partial(int)\n{k}.value = {ones}", attribute),
        (f"{k} = {{'value': {ones}}}", (f"{k}['value'] = {{}}", f"{k}['value']")),
        (f"{k} = {{'value': {ones}}}", (f"{k}.update(value={{}})", f"{k}['value']")),
        (f"{k} = [{ones}]", (f"{k}[0] = {{}}", f"{k}[0]")),
        (f"{k} = contextvars.ContextVar('{k}', default={ones})", (f"{k}.set({{}})", f"{k}.get()")),
        (f"{k} = None", (f"os.environ['FUZZED_{k}'] = str({{}})", f"os.environ.get('FUZZED_{k}')")),
        (f"{k} = None", ("$o.param_groups[0]['tag'] = {}", "$o.param_groups[0].get('tag')")),
        (f"{k} = $o", (f"{k}.tag = {{}}", f"{k}.tag")),
    )
    numbers = [
        (f"{k} = np.ones(2)", (f"{k}[0] = {{}}", f"float({k}[0])")),
        (f"{k} = array.array('d', [1.0])", (f"{k}[0] = {{}}", f"{k}[0]")),
        (f"{k} = random.Random(1)", (f"{k}.seed({{}})", f"{k}.getstate()[1][5]")),
        (f"{k} = None", ("random.seed({})", "random.getstate()[1][5]")),
        (f"{k} = torch.Generator()", (f"{k}.manual_seed(int({{}}))", f"{k}.get_state().sum().item()")),
        (f"{k} = None", ("$o.param_groups[0]['lr'] = {} / 50", "$o.param_groups[0]['lr']")),
        (f"{k} = 1000", (f"sys.setrecursionlimit({k} + int({{}}))", "sys.getrecursionlimit()")),
    ]
    truths = [
        (f"{k} = $m.a", (f"{k}.train({{}})", f"{k}.training")),
        (f"{k} = $m", (f"{k}.train({{}})", f"[part.training for part in {k}.modules()]")),
        (f"{k} = nn.Dropout(0.0)", (f"{k}.train({{}})", f"{k}.training")),
        (f"{k} = $m.a.weight", (f"{k}.requires_grad_({{}})", f"{k}.requires_grad")),
        (f"{k} = None", ("torch.use_deterministic_algorithms({}, warn_only=True)",
                         "torch.are_deterministic_algorithms_enabled()")),
        (f"{k} = None", ("gc.enable() if {} else gc.disable()", "gc.isenabled()")),
    ]  # fmt: skip
    if ones == "1.0" and d.chance(0.5):
        setup, (put, get) = d.rng.choice(numbers)
    elif ones == "True" and d.chance(0.6):
        setup, (put, get) = d.rng.choice(truths)
        threes = "True"
    d.top.append(
        f"class {cls}:\n    value = {ones}\n\n    @property\n    def shown(self):\n        return self.value\n\n"
        "    @shown.setter\n    def shown(self, value):\n        self.value = value"
    )
    first, other = d.pick((ones, twos), (ones, twos), (twos, threes))
    outside = put.replace("$", "")
    d.setup.append(setup.replace("$", ""))
    d.setup.append(f"{outside.format(ones)}\n{seen} = []")
    store = put.format(first)
    if d.chance(0.2):
        store = f"{put.format(other)}\n{store}"
    elif d.chance(0.15):
        store = f"if {get} != {first}:\n    {store}"
    (d.pre if d.chance(0.5) else d.post).append(store)
    for _ in range(d.rng.randint(1, 3)):
        d.at(outside.format(other))
    if d.chance(0.2):
        d.each.append(outside.format(twos))
    d.after.append(f"{seen}.append({get.replace('$', '')})")
    d.end.append(outside.format(ones))


def beside(d: Draft) -> None:
    """A kept tensor with something besides its values: a gradient, attributes."""
    p, aux = place(d, "None"), d.name("aux")
    init = d.pick(
        "out", "out", "(out * 2)", "out.detach().requires_grad_()", "torch.zeros_like(out, requires_grad=True)"
    )
    d.mid.append(f"{aux} = {init}\nloss = loss + 0.1 * ({aux} * out).mean()")
    if init in ("out", "(out * 2)"):
        d.mid.append(f"{aux}.retain_grad()")
    note = d.pick("", f"{aux}.tag = 'x'", f"{aux}.more = loss.detach() * 2", f"{aux}.more = [loss.detach(), 1]")
    if note:
        d.post.append(note)
    d.post.append(p.put(aux))
    if d.chance(0.4):
        d.mid.append(
            f"if {p.get} is not None:\n    loss = loss + 0.1 * {d.pick(p.get + '.grad', p.get)}.detach().sum()"
        )
    kept = d.name("all")
    d.setup.append(f"{kept} = []")
    d.results.append(aux)
    d.after.append(
        f"{kept}.append((result[-1].grad, getattr(result[-1], 'more', None), getattr(result[-1], 'tag', None)))"
    )


def read_past(d: Draft) -> None:
    """A number in an object, read in another way than by attribute, and changed between steps."""
    s = d.name("box")
    cls = s.capitalize()
    plain = f"class {cls}:\n    def __init__(self):\n        self.v = 1.0"
    renames = (
        f"{plain}\n\n    def __getattribute__(self, name):\n"
        "        return {}.__getattribute__(self, 'v' if name == 'scale' else name)"
    )
    top, init, read = d.pick(
        (renames.format("object"), f"{cls}()", f"{s}.scale"),
        (renames.replace("__(self, 'v'", "__('v'").format("super()"), f"{cls}()", f"{s}.scale"),
        (plain, f"{cls}()", f"object.__getattribute__({s}, 'v')"),
        (plain, f"{cls}()", f"copy.copy({s}).v"),
        (plain, f"{cls}()", f"copy.deepcopy([{s}])[0].v"),
        (plain, f"{cls}()", f"{s}.__reduce_ex__(2)[2]['v']"),
        (f"class {cls}(types.SimpleNamespace):\n    pass", f"{cls}(v=1.0)", f"(1.0 + ({s} == {cls}(v=1.0)))"),
        ("", "types.SimpleNamespace(v=1.0)", f"(1.0 + ({s} == types.SimpleNamespace(v=1.0)))"),
        ("", "types.SimpleNamespace(v=1.0)", f"float(repr({s}).split('v=')[1][:3])"),
        ("", "types.SimpleNamespace(v=1.0)", f"copy.copy({s}).v"),
    )  # fmt: skip
    if top:
        d.top.append(top)
    d.setup.append(f"{s} = {init}")
    d.mid.append(f"loss = loss * {read}")
    for _ in range(d.rng.randint(1, 2)):
        d.at(f"{s}.v = {d.rng.randint(2, 9) / 10}")
    if d.chance(0.3):
        d.post.append(f"{s}.n = 3")


def derived(d: Draft) -> None:
    """An object of a class that derives from one of C; the step changes its attributes, and their order."""
    s, order = d.name("made"), d.name("order")
    cls = s.capitalize()
    base, args = d.pick(
        ("io.StringIO", ""),
        ("io.BytesIO", "b'a'"),
        ("functools.partial", "max, 1"),
        ("queue.SimpleQueue", ""),
        ("types.SimpleNamespace", "u='a'"),
        ("itertools.count", ""),
        ("threading.local", ""),
        ("array.array", "'d'"),
        ("fractions.Fraction", "1, 2"),
        ("ast.AST", ""),
        ("ValueError", "'a'"),
    )
    if d.chance(0.8):
        d.top.append(f"class {cls}({base}):\n    pass")
        init = f"{cls}({args})"
    else:
        init = d.pick("functools.partial(max, 1)", "functools.lru_cache(abs)", "types.SimpleNamespace()", "KeyError(1)")
    d.setup.append(f"{s}, {order} = {init}, []\n{s}.v, {s}.w = 1.0, 0.5")
    read = d.pick(
        f"{s}.v",
        f"getattr({s}, 'v')",
        f"sum(x for x in vars({s}).values() if type(x) is float)",
        f"(1.0 + 0.1 * list(vars({s})).index('v'))",
        f"{s}.__dict__['v']",
        f"(0.5 if hasattr({s}, 'w') else 1.0)",
    )
    d.mid.append(f"loss = loss * {read}")
    d.at(f"{s}.v = {d.rng.randint(2, 9) / 10}")
    if d.chance(0.7):
        d.post.append(
            d.pick(
                f"{s}.n = 3",
                f"{s}.n = [getattr({s}, 'n', None) is None]",
                f"v = {s}.v\ndel {s}.v\n{s}.v = v",
                f"if hasattr({s}, 'w'):\n    del {s}.w\nelse:\n    {s}.w = 0.5",
                f"{s}.__dict__.update(z=1)",
            )
        )
        d.after.append(f"{order}.append(list(vars({s})))")


def listed(d: Draft) -> None:
    """A tensor of a list of numbers that change."""
    n = d.name("count")
    d.setup.append(f"{n} = [{d.pick('0', '1.5', '3')}]")
    numbers = d.pick(
        f"[{n}[0] * 0.1, {n}[0] / 7]",
        f"[{n}[0], 1, True]",
        f"[[{n}[0] + i] for i in range(3)]",
        f"[{n}[0] ** 2, loss.item()]",
        f"[v * 0.5 for v in ({n}[0], 2.0)][::-1]",
    )
    make = d.pick(
        f"torch.tensor({numbers})",
        f"torch.as_tensor({numbers})",
        f"out.new_tensor({numbers})",
        f"torch.tensor({numbers}, dtype={d.pick('torch.float32', 'torch.int64', 'torch.bfloat16')})",
    )
    d.mid.append(f"loss = loss + 0.01 * {make}.float().mean()")
    d.post.append(d.pick(f"{n}[0] += 1", f"{n}[0] = min({n}[0] + 0.5, 4)", f"{n}[0] -= 0.25"))


def remembered(d: Draft) -> None:
    """Tensors and lists that a function caches."""
    f, n = d.name("table"), d.rng.randint(2, 3)
    made = d.pick("torch.full((2,), n * 0.5)", "(torch.ones(2), n)", "[torch.arange(n) * 0.1]", "[n * 0.1]")
    d.top.append(f"@functools.lru_cache{d.pick('', '(maxsize=None)')}\ndef {f}(n):\n    return {made}")
    if d.chance(0.3):
        d.setup.append(f"{f}(2)")
    first = "" if made.startswith("torch") else "[0]"
    value = f"{f}({n}){first}" if made == "[n * 0.1]" else f"{f}({n}){first}.sum()"
    d.mid.append(f"loss = loss + 0.1 * {value}")
    if made == "[n * 0.1]" and d.chance(0.5):
        d.post.append(f"{f}({n})[0] *= 0.5")
    d.at(f"{f}.cache_clear()")


def untraceable(d: Draft) -> None:
    """What can be computed, but not traced."""
    d.mid.append(d.pick("loss = loss + x.to_sparse().to_dense().mean()", "loss = loss + x.to_sparse().sum().item()"))


def only_clears(d: Draft) -> None:
    """An optimizer that only clears gradients, and whose weights are replaced."""
    o = d.name("clears")
    d.setup.append(f"{o} = torch.optim.SGD(list(m.parameters())[:{d.rng.randint(1, 3)}], lr=0.1)")
    if d.chance(0.5):
        d.update.append(f"{o}.zero_grad(set_to_none={d.pick('True', 'False')})")
    else:
        d.pre.append(f"{o}.zero_grad()")
    others = f"[p for p in m.parameters() if all(p is not q for g in {o}.param_groups for q in g['params'])]"
    d.at(
        d.pick(
            f"{o}.param_groups[0]['params'].pop()",
            f"{o}.param_groups = []",
            f"{o}.add_param_group({{'params': {others}[:1]}})",
        )
    )


def keyed(d: Draft) -> None:
    """A dict whose keys are objects: weights, modules, the user's own, unrelated tensors, tuples of them."""
    k, t = d.name("Key"), d.name("by")
    d.names.remove(k)
    d.top.append(f"class {k}:\n    def __init__(self, gain):\n        self.gain = gain")
    keys = [f"{k}(0.3)", f"{k}(0.7)", f"({k}(0.5), 1)", f"frozenset([{k}(0.2)])", "torch.ones(2)", "nn.Linear(2, 2)"]
    keys += ["nn.Parameter(torch.ones(2))", "m.z.weight", "m.z", "m.a.weight", "'plain'", "1.5"]
    content = ", ".join(f"{key}: {d.rng.randint(1, 9) / 10}" for key in d.rng.sample(keys, d.rng.randint(1, 5)))
    content = d.pick(f"{{{content}}}", f"{{{content}}}", f"collections.OrderedDict({{{content}}})")
    d.setup.append(f"{t} = {content}")
    if d.chance(0.1):  # more than are inspected
        d.setup.append(f"{t}.update({{{d.pick(f'{k}(0.1)', 'torch.ones(1)', 'i')}: 0.1 for i in range(1100)}})")
    if d.chance(0.6):
        gain = (
            f"getattr(part, 'gain', 0.0) for key in list({t}) for part in (key if isinstance(key, tuple) else (key,))"
        )
        d.mid.append(f"loss = loss + 0.1 * sum({gain}) * out.mean()")
        d.at(f"for key in list({t}):\n    if isinstance(key, {k}):\n        key.gain = 0.9")
    d.post.append(
        d.pick(
            f"for p in m.parameters():\n    {t}[p] = {t}.get(p, 0.0) * 0.5 + p.detach().mean()",
            f"{t}[m.a] = loss.detach()",
            f"{t}[m] = {t}.get(m, 0.0) + loss.detach()",
            f"{t}['now'] = out.detach().mean(0)",
            f"{t}.setdefault(m.a.weight, loss.detach())",
            f"{t}.pop(next(iter({t}), None), None)\n{t}['now'] = loss.detach()",
            f"{t}.pop('plain', None)",
        )
    )
    if d.chance(0.3):
        d.at(d.pick(f"{t}[{k}(0.4)] = 0.2", f"{t}.pop(next(iter({t}), None), None)", f"{t}[torch.zeros(1)] = 0.5"))


def reused_batch(d: Draft) -> None:
    """The caller's batch is in memory that is overwritten as soon as a call has returned."""
    kept = d.name("buf")
    kind = d.pick("filled", "filled", "refilled", "doubled", "strided", "twice")
    if kind == "filled":
        d.after.insert(0, d.pick("y.fill_(9.0)", "y.zero_()", "y.mul_(2)", "x.zero_()"))
    elif kind == "refilled":
        d.setup.append(f"{kept} = torch.zeros(6, 3)")
        d.each.append(f"if y.shape == {kept}.shape:\n    {kept}.copy_(y)\n    y = {kept}")
    elif kind == "doubled":
        d.each.append("y = torch.cat([y, y])[::2]")
    elif kind == "strided":
        d.each.append("y = y.t().contiguous().t()")
    else:
        d.setup.append(f"{kept} = []")
        d.after.append(f"{kept}.append((x, y))")


def resized(d: Draft) -> None:
    """Batches of other sizes, most of them new when they come."""
    rows = d.name("rows")
    d.setup.append(
        f"{rows} = {d.pick('[7, 3, 11, 5, 9, 4, 8, 2]', '[6, 4, 5, 3, 2, 3, 5, 3]', '[3, 5, 3, 5, 7, 9, 2]')}"
    )
    d.each.append(f"x, y = (torch.cat([t, t])[: {rows}[i % len({rows})]] for t in (x, y))")


def edited_after(d: Draft) -> None:
    """What a step reads is edited as soon as the call has returned, when the step may not have run yet."""
    s = d.name("w")
    _outside(d, "base")
    d.setup.append(f"{s} = {d.pick('torch.ones(3)', 'base[1:4]', 'base.view(3, 4).t()[1]', 'base[:3]')}")
    d.mid.append(f"loss = loss + 0.1 * ({s} * out.mean(0)).sum()")
    d.after.insert(
        0,
        d.pick(
            f"{s}.mul_(0.9)",
            f"{s}.fill_(i)",
            "base.add_(0.1)",
            f"{s}.numpy()[:] = i",
            "with torch.no_grad():\n    m.z.weight.mul_(0.95)",
            "m.z.weight.data[0, 0] = 0.1",
            "m.z.weight.detach().numpy()[1] *= 0.9",
            "loss.detach().mul_(0)",
        ),
    )


PIECES = (
    [rebound] * 8
    + [edited] * 5
    + [swapped] * 2
    + [chained] * 2
    + [appended] * 6
    + [by_name] * 4
    + [buffer_ring] * 2
    + [views] * 4
    + [weight_view] * 3
    + [counter] * 7
    + [computed] * 7
    + [meter] * 3
    + [history] * 3
    + [extremum] * 2
    + [data_edited] * 2
    + [evaluated] * 2
    + [changed_outside] * 6
    + [exchanged]
    + [of_kinds] * 6
    + [advanced] * 3
    + [generator] * 2
    + [sized] * 4
    + [called] * 5
    + [grown] * 4
    + [looked_up] * 6
    + [tensors_outside] * 5
    + [other_memory] * 2
    + [conjugated] * 2
    + [leaf] * 2
    + [second_gradient]
    + [weights_in_step] * 3
    + [model_in_step] * 3
    + [groups_in_step] * 3
    + [skipped] * 2
    + [returned] * 3
    + [returned_plain] * 3
    + [arrays] * 3
    + [second_step] * 3
    + [held_objects] * 3
    + [keyed] * 3
    + [stored] * 5
    + [beside] * 3
    + [read_past] * 3
    + [derived] * 3
    + [remembered] * 2
    + [listed] * 2
    + [only_clears]
    + [outside] * 3
    + [reused_batch] * 3
    + [resized] * 4
    + [edited_after] * 3
    + [closed_over]
    + [argument_edited] * 3
    + [reads] * 8
)
RARE = [drawn, untraceable]
