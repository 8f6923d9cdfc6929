"""Steps with conjugate and negative views, and views of another dtype, of a weight's memory."""

import types

import pytest
import torch
from torch import nn

import firstloss as fl

CALLS = 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.l = nn.Linear(3, 3)

    def forward(self, x):
        return (self.l(x) * self.w).abs().pow(2).sum()


def numbers(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return torch.view_as_real(plain) if plain.is_complex() else plain


# Statements before the step, in the step, and after each call; `n` is the number of the call.
PROGRAMS = {
    "returned": ("", "y = x + 1j\ns.all = [y, y.conj(), y.imag, y.conj().imag]", "s.all[0].mul_(2)"),
    "returned and edited": ("", "y = x + 1j\ns.all = [y.conj(), y]", "s.all[0].mul_(2j)"),
    "kept": (
        "s.k = torch.zeros(3) + 0j",
        "extra = s.k.abs().sum()\ns.y = x + 1j\ns.k = s.y.conj()",
        "s.y.mul_(1j)",
    ),
    "rebound": (
        "s.k = k + 0",
        "s.k = s.k.conj() * 1\ns.t = s.k.conj()\nextra = (s.t * x).imag.sum()",
        "s.k.mul_(1.1j)",
    ),
    "rebound to a view": ("s.k = k", "s.k = s.k.conj()\nextra = (s.k * x).imag.sum()", "s.k += 0.1j"),
    "from outside": ("v = k.conj()", "extra = (v * x).imag.sum()", "k.mul_(1j)"),
    "another one from outside": ("s.v = k.conj()", "extra = (s.v * x).imag.sum()", "s.v = (k * n).conj()"),
    "edited from outside": ("v = k.conj()", "extra = (v * x).imag.sum()\nv.detach().mul_(0.5j)", "s.k = k"),
    "edited base": ("v = k.conj()", "k.add_(1j * x)\nextra = (v * x).imag.sum() + k.imag.sum()", "s.v = v"),
    "edited part": ("", "v = k.conj()\nv.mul_(0.5)\nv.imag.add_(x)\nextra = k.abs().sum()", "s.k = k"),
    "negated": ("", "s.n = k.conj().imag\nextra = (s.n * x).sum()\nk.mul_(1j)", "s.n.mul_(2)"),
    "of a weight": ("v, i = m.w.detach().conj(), m.w.detach().conj().imag", "extra = (v * x).imag.sum() + i.sum()", ""),
    "of a weight, edited": ("v = m.w.detach().conj()", "", "v.mul_(1j)\ns.w = m.w"),
    "argument": ("", "s.a = a.conj()\nextra = (s.a * x).imag.sum()", "s.a.mul_(2)"),
    "edited argument": ("", "a.mul_(1j)\nextra = (a.conj() * x).imag.sum()", "s.a = a"),
    "imaginary part": ("", "s.i = k.imag\nextra = k.real.sum()", "s.i.mul_(2)\ns.k = k"),
    "as real": ("", "s.i = torch.view_as_real(k)\nextra = k.real.sum()", "s.i.mul_(2)\ns.k = k"),
    "as complex": ("r = torch.ones(2, 2)", "s.i = torch.view_as_complex(r)\nextra = r.sum()", "s.i.mul_(2j)"),
    "bytes": ("", "s.i = k.real.view(torch.int32)\nextra = k.real.sum()", "s.i[0] = n << 20\ns.k = k"),
    "of a number, in a backward pass": (
        "",
        "with torch.enable_grad():\n    extra = (((m.w * 2j - 1j) / (1 + 1j)) ** 2j).real.sum()",
        "",
    ),
    "a weight's memory": (
        "s.t = torch.from_numpy(m.l.bias.detach().numpy())",
        "extra = (s.t * x).sum()",
        "s.t = torch.from_numpy(m.l.bias.detach().numpy()) if n == 3 else torch.ones(3) * n",
    ),
}


def trained(name, backend):
    """The program's values after each call."""
    before, during, after = PROGRAMS[name]
    torch.manual_seed(0)
    m = Net()
    model = fl.compile(m, backend)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
    k, s = torch.complex(torch.arange(3.0), torch.ones(3)) / 3, types.SimpleNamespace()
    scope = {"torch": torch, "k": k, "s": s, "m": m}
    exec(before, scope)
    code = compile(during, __file__, "exec")

    @fl.trace
    def step(x, a):
        inner = {**scope, "x": x, "a": a, "extra": 0}
        with torch.no_grad():
            exec(code, inner)
        loss = model(x) + inner["extra"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    results = []
    for n in range(CALLS):
        a = (torch.arange(3.0) + 1j) * n
        results.append(step(torch.arange(3.0) * n / 7, a.conj() if n % 2 else a))
        exec(after, {**scope, "n": n, "a": a})
        kept = [t for part in vars(s).values() for t in (part if isinstance(part, list) else [part])]
        results += [numbers(t) for t in (*kept, k)]
        results += [torch.tensor([t.is_conj(), t.is_neg()]) for t in kept]
    return results


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
@pytest.mark.filterwarnings("error:.*this raises:firstloss.errors.EagerStepWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_views_in_a_step_match_eager(name):
    for traced, eager in zip(trained(name, fl.backend("XLA")), trained(name, fl.backend("CPU")), strict=True):
        # sums and products in another order
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-5)


class Held(nn.Module):
    """A weight, and views that a constructor may keep."""

    def __init__(self, make):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        make(self)

    def forward(self, x):
        return (x * self.w * self.b).abs().pow(2).sum()


def buffer(self):
    self.register_buffer("b", self.w.detach().conj())


def buffer_alone(self):
    self.register_buffer("b", torch.randn(3, dtype=torch.complex64).conj())


def attribute(self):
    self.b = self.w.detach().conj()


def parameter_alone(self):
    self.b = nn.Parameter(torch.randn(3, dtype=torch.complex64).conj())


def parameter(self):
    self.b = nn.Parameter(self.w.detach().conj())


def trained_with(make, how):
    torch.manual_seed(0)
    backend = fl.backend("CPU" if how == "eager" else "XLA")
    if how == "deferred":
        with backend.device:
            m = Held(make)
    else:
        m = Held(make)
    model = fl.compile(m, backend)
    optimizer = torch.optim.SGD([m.w], lr=0.01)

    @fl.trace
    def step(x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    results = []
    for edited in (m.w, m.b, m.w):
        results += [step(torch.arange(3.0) + 1), numbers(m.w), numbers(m.b)]
        with torch.no_grad():
            edited.mul_(1.1j)
        results += [numbers(m.w), numbers(m.b)]
    return results


@pytest.mark.parametrize("how", ["deferred", "moved"])
@pytest.mark.parametrize("make", [buffer, buffer_alone, attribute, parameter_alone])
def test_a_model_with_a_conjugate_buffer_matches_eager(make, how):
    for traced, eager in zip(trained_with(make, how), trained_with(make, "eager"), strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-5)  # as above


@pytest.mark.parametrize("how", ["deferred", "moved"])
def test_a_conjugate_parameter_with_shared_memory_is_refused(how):
    with pytest.raises(
        fl.errors.BackendError, match=r"test_conjugate_views.py:\d+.*conjugated or negated view of memory"
    ):
        trained_with(parameter, how)
