"""Random constructors: deferred and eager construction leave the same state, bit for bit, random stream included.

`generate(seed)` is a program's text: `build()` creates a module from layers, tensors, views, ties, in-place edits,
reads of values and generators, and `after(model)` continues when the capture has ended. Each line is run as it is
generated, so that shapes match; `check(source)` runs the program eagerly and deferred, and compares.
"""

# ruff: noqa: E501 (templates, a line each)
from __future__ import annotations

import contextlib
import functools
import linecache
import random
import traceback as tracebacks
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import firstloss as fl
from tests.capture.eager_comparison import assert_same, bytes_of, seed_all, tensors_of

from .outcome import DIFFERS, DISCARDED, FOREIGN, REFUSED, SAME, Outcome

__all__ = ["check", "generate"]

_HEAD = """import copy
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import firstloss as fl
"""

_FLOATS = ["torch.float32"] * 6 + ["torch.float64", "torch.bfloat16", "torch.float16"]
_SHAPES = ["3, 4", "4, 4", "5", "17", "2, 3, 4", "33, 5", "16", "1", "0, 3", "40", "4, 1, 3"]

_MAKE = [
    "torch.randn({s})", "torch.randn({s}, dtype={d})", "torch.rand({s}, dtype={d})", "torch.zeros({s})",
    "torch.ones({s}, dtype={d})", "torch.full(({s},), {x})", "torch.empty({s}).normal_({x}, 0.5)",
    "torch.empty({s}, dtype={d}).uniform_(-1, {p})", "torch.arange({n}.0)", "torch.linspace(-1, {p}, {n})",
    "torch.eye({n})", "torch.randint(0, {n}, ({s},))", "torch.randint(-5, 1 << 40, ({s},))", "torch.randperm({n})",
    "torch.bernoulli(torch.full(({s},), 0.3))", "torch.tensor([[1.0, {x}], [{p}, 4.0]])", "torch.tensor({n})",
    "torch.from_numpy(np.arange({n}, dtype=np.float32))", "torch.from_numpy(np.random.randn({n}, 3))",
    "torch.as_tensor(np.random.rand(4).astype('float32'))", "torch.tril(torch.ones({n}, {n}))",
    "torch.randn({n}, generator=torch.Generator().manual_seed({n}))", "torch.randn({s}, dtype=torch.complex64)",
    "nn.Parameter(torch.randn({s}))", "nn.Parameter(torch.empty({s}).normal_(), requires_grad=False)",
    "torch.logspace(0, 1, {n})", "torch.hann_window({n})", "torch.normal(0.0, {p}, ({s},))",
    "torch.empty_like(torch.zeros({s})).exponential_()", "torch.empty({s}).log_normal_()", "torch.empty({s}).cauchy_()",
    "torch.empty({s}).geometric_(0.3)", "torch.distributions.Gamma(torch.ones({n}), 1.0).sample()",
]  # fmt: skip
_OF_ONE = [
    "{t}.clone()", "{t} * {x}", "{t} + {t}", "-{t}", "{t}.abs().sqrt()", "{t}.exp()", "torch.zeros_like({t})",
    "torch.randn_like({t})", "torch.rand_like({t})", "torch.full_like({t}, {x})", "{t}.to({d})", "{t}.double()",
    "torch.where({t} > 0, {t}, {x})", "torch.cat([{t}, {t}])", "torch.stack([{t}, {t}], -1)", "F.relu({t})",
    "F.dropout({t}, 0.3)", "torch.rrelu({t}, training=True)", "torch.sort({t})[0]", "torch.cumsum({t}, 0)",
    "torch.softmax({t}, 0)", "{t} / {t}.norm()", "{t}.mean(0)", "{t}.var()", "torch.bernoulli({t}.sigmoid())",
    "torch.multinomial({t}.abs().flatten() + 0.1, 2)", "torch.poisson({t}.abs())", "torch.triu({t})",
    "torch.flip({t}, [0])", "torch.roll({t}, 1, 0)", "{t}.max()", "torch.outer({t}.flatten(), {t}.flatten())",
    "torch.linalg.svdvals({t}.float())", "torch.linalg.qr({t}.float())[0]", "torch.linalg.matrix_norm({t}.float(), 2)",
    "{t} @ {t}.mT", "torch.einsum('i...,i...->...', {t}, {t})", "torch.nonzero({t})", "torch.unique({t})",
    "{t}[{t} > 0]", "torch.topk({t}.flatten(), 2)[0]", "torch.fft.rfft({t}.float())",
    "torch.special.erfinv({t}.clamp(-0.9, 0.9))", "torch.clamp({t}, min=-0.5)", "F.pad({t}, (1, 2))",
    "torch.empty_like({t}).normal_()", "{t}.new_empty(3).uniform_()", "{t}.new_tensor([1.0, {x}])", "{t}.new_zeros(2, 2)",
    "torch.tensor({t}.tolist())", "torch.histc({t}.float(), 4)", "torch.cdist({t}.float(), {t}.float())",
    "nn.Parameter({t})", "nn.Parameter({t}.detach().clone())", "copy.deepcopy({t}.detach())", "copy.copy({t})",
    "{t}.detach().numpy().copy()", "torch.binomial(torch.full_like({t}, 5.0), {t}.abs().clamp(0, 1))",
    "F.batch_norm({t}, torch.zeros({t}.shape[1]), torch.ones({t}.shape[1]))", "F.layer_norm({t}, {t}.shape)",
    "F.gumbel_softmax({t}.float(), dim=0)", "F.alpha_dropout({t}.float(), 0.2, training=True)",
]  # fmt: skip
_VIEWS = [
    "{t}[1:]", "{t}[0]", "{t}[..., :2]", "{t}[::2]", "{t}.t()", "{t}.mT", "{t}.view(-1)", "{t}.flatten()", "{t}.detach()",
    "{t}.unsqueeze(0)", "{t}.squeeze()", "{t}.transpose(0, -1)", "{t}.diagonal()", "{t}.narrow(0, 1, 2)",
    "{t}.chunk(2)[1]", "torch.unsafe_split({t}, 2)[1]", "{t}.unbind(0)[-1]", "{t}.expand(2, *{t}.shape)", "{t}.data",
    "{t}.unfold(0, 2, 1)", "{t}.reshape(-1)", "torch.view_as_real({t})", "{t}.real", "{t}.view(torch.int32)",
    "{t}.contiguous()", "{t}.permute(*reversed(range({t}.dim())))", "{t}.conj().resolve_conj()", "{t}.conj()", "{t}.conj().imag", "{t}.T", "{t}.swapaxes(0, -1)",
]  # fmt: skip
_EDITS = [
    "{t}.normal_()", "{t}.normal_({x}, 0.02)", "{t}.uniform_(-{p}, {p})", "{t}.zero_()", "{t}.fill_({x})", "{t}.mul_({x})",
    "{t}.add_({t})", "{t}.clamp_(-0.5, 0.5)", "{t}.copy_(torch.randn({t}.shape))", "{t}.copy_({u})", "{t}.add_({u}, alpha={x})",
    "{t}[0] = {x}", "{t}[1:] = {t}[:-1].clone()", "{t}[..., 0] = {t}[..., -1]", "{t}[{t} > 0] = {x}", "{t} += 1", "{t} *= {t}",
    "{t}.masked_fill_({t} > 0.5, {x})", "{t}.erfinv_()", "{t}.neg_()", "{t}.abs_()", "{t}.exponential_()", "{t}.random_(0, 9)",
    "{t}.bernoulli_(0.4)", "{t}.fill_diagonal_({x})", "{t}.t_()", "{t}.unsqueeze_(0)", "{t}.squeeze_()", "n = {t}.numel(); {t}.resize_(2, 2).view(-1)[n:].fill_({x})",
    "{t}.index_fill_(0, torch.tensor([0]), {x})", "{t}.scatter_(0, torch.zeros(1, *{t}.shape[1:], dtype=torch.long), {x})",
    "{t}.data = torch.randn({t}.shape)", "{t}.data.mul_({x})", "{t}.set_({u})", "{t}.requires_grad_(False)", "{t}.tag = 'it'",
    "{t}.cumsum_(0)", "torch.add({t}, {u}, out={t})", "torch.mul({t}, {x}, out={t})", "torch.randn({t}.shape, out={t})",
    "F.relu_({t})", "torch.rrelu_({t}, training=True)", "F.dropout({t}, 0.5, inplace=True)", "{t}.numpy()[...] += 1",
    "{t}.detach().numpy().fill({x})", "torch.swap_({t})", "{t}.share_memory_()", "{t}.index_add_(0, torch.tensor([0]), {t}[:1])",
    "nn.init.normal_({t}, std=0.02)", "nn.init.trunc_normal_({t}, std=0.5)", "nn.init.xavier_uniform_({t})",
    "nn.init.kaiming_normal_({t})", "nn.init.orthogonal_({t})", "nn.init.eye_({t})", "nn.init.sparse_({t}, 0.5)",
    "nn.init.constant_({t}, {x})", "nn.init.dirac_({t})", "nn.init.kaiming_uniform_({t}, a=math.sqrt(5))",
    "torch._foreach_mul_([{t}, {u}], {p})", "torch._foreach_add_([{t}, {u}], [{u}, {t}])", "torch._foreach_zero_([{t}, {t}])",
    "torch._foreach_lerp_([{t}, {u}], [torch.zeros_like({t}), torch.ones_like({u})], 0.25)",
    "torch._foreach_copy_([{t}, {u}], [torch.randn({t}.shape), torch.rand({u}.shape)])", "torch._foreach_clamp_min_([{t}], 0.0)",
    "assert {t}.is_contiguous()  # or else PyTorch writes where it should not\ntorch._fused_sgd_([{t}], [torch.ones_like({t})], [],"
    " weight_decay=0.1, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=True)",
    "torch.utils.swap_tensors({t}, {u})", "{t}.real.fill_({x})", "{t}.imag.normal_()", "{t}.sort(0)[0].zero_()",
]  # fmt: skip
_READS = [
    "if {t}.sum() > 0:\n    {t}.mul_(-1)", "if float({t}.max()) > 0.5:\n    torch.manual_seed({n})", "numbers.append({t}.tolist())",
    "numbers.append(float({t}.float().mean()))", "numbers.append(str({t}.detach()))", "numbers.append({t}.flatten()[0].item())",
    "numbers.append(bool(({t} == {t}).all()))", "numbers.append(torch.equal({t}, {u}))", "numbers.append(np.asarray({t}.detach()))",
    "for row in {t}:\n    numbers.append(row.abs().max().item())", "numbers.append(torch.allclose({t}, {u}))",
    "{t}.mul_(float({u}.abs().max()))", "numbers.append(int({t}.argmax()))", "numbers.append({t}.isnan().any().item())",
    "{t}[int({u}.argmax()) % 2] = {x}", "numbers.append({t}.data_ptr() == {t}.detach().data_ptr())",
]  # fmt: skip
_STREAM = [
    "torch.manual_seed({n})", "g = torch.Generator().manual_seed({n})", "state = torch.get_rng_state()", "torch.rand({n})",
    "torch.set_rng_state(state)", "g.manual_seed({n})", "with torch.random.fork_rng(devices=[]):\n    torch.manual_seed({n})\n    forked = torch.randn({n})",
    "kept = g.get_state()", "g.set_state(kept)", "numbers.append(torch.initial_seed())", "torch.default_generator.seed()[:0]",
]  # fmt: skip
_DRAWN = ["torch.randn({s}, generator=g)", "torch.rand({n}, generator=g)", "torch.empty({s}).normal_(generator=g)"]
_LAYERS = [
    "nn.Linear(4, {n})", "nn.Linear(4, 4, bias=False)", "nn.Linear(4, 4, dtype={d})", "nn.Conv2d(3, 4, 3)", "nn.Conv1d(4, 4, 2, groups=2)",
    "nn.Embedding(7, 4, padding_idx=2)", "nn.EmbeddingBag(5, 4)", "nn.LSTM(4, 3, 2)", "nn.GRU(4, 4, bidirectional=True)",
    "nn.BatchNorm1d(4)", "nn.LayerNorm(4)", "nn.GroupNorm(2, 4)", "nn.MultiheadAttention(4, 2)", "nn.Bilinear(3, 4, 2)",
    "nn.TransformerEncoderLayer(4, 2, 8)", "nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2)", "nn.PReLU(3)",
    "nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))", "nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])",
    "nn.ParameterList([torch.randn(3), torch.ones(2)])", "nn.ConvTranspose2d(2, 3, 2)", "nn.RNNCell(3, 4)",
    "nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))", "nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))",
    "nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))", "nn.utils.spectral_norm(nn.Linear(4, 3))",
    "nn.utils.weight_norm(nn.Linear(3, 3))", "nn.InstanceNorm1d(3, affine=True, track_running_stats=True)",
]  # fmt: skip
_ON_MODULES = [
    "{m}.apply(lambda sub: nn.init.normal_(sub.weight, std=0.02) if isinstance(sub, nn.Linear) else None)",
    "{m}.reset_parameters()", "{m}.half()", "{m}.double()", "{m}.to(torch.bfloat16)", "{m}.eval()", "{m}.requires_grad_(False)",
    "{v} = copy.deepcopy({m})", "{m}.extra = {t}", "{m}.register_buffer('table', {t}.detach().clone(), persistent=False)",
    "{m}.weight = {o}.weight", "{m}.bias = None", "{m}.weight.data.mul_({x})", "{m}.weight = nn.Parameter({t}.detach())",
    "{m}.weight.data = {t}", "{v} = {m}.weight", "{v} = {m}.weight.t()", "{v} = list({m}.parameters())[-1]", "{m}.weight.data = {m}.weight.data.clone()",
    "{v} = nn.ModuleDict({{'a': {m}, 'b': {o}}})", "{v} = nn.Sequential({m}, {o})", "{m}.load_state_dict({o}.state_dict())",
    "{m}.load_state_dict({{k: torch.ones_like(v) for k, v in {m}.state_dict().items()}})", "{m}.train()",
    "{m}.load_state_dict(copy.deepcopy({m}.state_dict()), assign=True)", "nn.init.zeros_({m}.bias)", "{v} = {m}(torch.ones(3, 4)).detach()",
    "{v} = {m}(torch.randn(2, 4))", "{v} = {m}(torch.tensor([0, 2]))", "for p in {m}.parameters():\n    nn.init.uniform_(p, -{p}, {p})",
    "with torch.no_grad():\n    for p in {m}.parameters():\n        p.mul_({p}).add_(0.01)", "{v} = [p.detach() for p in {m}.parameters()]",
    "nn.utils.parametrize.remove_parametrizations({m}, 'weight')", "nn.utils.prune.l1_unstructured({m}, 'weight', 2)",
    "nn.utils.prune.random_unstructured({m}, 'weight', 0.3)", "nn.utils.vector_to_parameters(torch.ones(sum(p.numel() for p in {m}.parameters())), {m}.parameters())",
    "{v} = nn.utils.parameters_to_vector({m}.parameters())", "{m}.share_memory()", "{m}.weight.register_hook(lambda grad: grad * 2)",
    "setattr({m}, 'weight', {m}.weight)", "{m}.register_parameter('more', nn.Parameter(torch.randn(2)))", "{m}._apply(lambda t: t + 1)",
    "{m}.to_empty(device='cpu')\nfor p in [*{m}.parameters(), *{m}.buffers()]:\n    p.data.fill_({x})",
    "torch.optim.AdamW({m}.parameters())", "torch.nn.utils.fuse_linear_bn_weights({m}.weight, {m}.bias, torch.zeros(4), torch.ones(4), 1e-5, torch.ones(4), torch.zeros(4))",
    "{v} = nn.utils.fusion.fuse_linear_bn_eval({m}.eval(), nn.BatchNorm1d({m}.out_features).eval())", "{m}.weight.requires_grad_(False).copy_({t})",
    "{m}.mask = {t} > 0", "{m}.cache = [{t}, {{'k': {t}}}]", "{m}.add_module('inner', {o})", "{m}.weight.grad = torch.ones_like({m}.weight)",
]  # fmt: skip
_WRAPS = [
    "with torch.no_grad():",
    "with torch.inference_mode(False):",
    "with torch.device('cpu'):",
    "with torch.enable_grad():",
]
_AFTER_ONLY = [
    "model.double().float()", "copy.deepcopy(model)", "model.state_dict()",
    "model.load_state_dict(model.state_dict())", "model.apply(lambda sub: sub.reset_parameters() if isinstance(sub, nn.Linear) else None)",
    "for p in model.parameters():\n    if p.is_floating_point():\n        nn.init.normal_(p, std=0.1)", "model.requires_grad_(True)", "torch.manual_seed({n})",
    "for p in model.parameters():\n    p.data = p.data.clone()", "model.eval()",
]  # fmt: skip


_MOST_ELEMENTS = 1 << 16  # otherwise the decompositions of a tensor take minutes


class _Draft:
    """A program under construction, and the values of its variables."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.count = 0
        self.scope: dict[str, Any] = {}
        exec(_HEAD, self.scope)
        self.hidden = set(self.scope)
        self.scope["numbers"] = []
        self.lines: list[str] = []

    def names(self, fits: Callable[[Any], bool]) -> list[str]:
        return [name for name, held in self.scope.items() if name not in self.hidden and fits(held)]

    def fill(self, template: str, edits: bool = False) -> str | None:
        """`template` with its placeholders filled in, or None if nothing fits.

        Args:
            edits: `{t}` is edited in place.
        """
        tensors, modules = self.names(_is_tensor), self.names(lambda held: isinstance(held, torch.nn.Module))
        # Even in eager PyTorch, an array of these may show freed memory, and growing shared memory crashes Python.
        before = "\n".join(self.lines)
        for first, then in (("asarray", "share_memory"), ("asarray", "resize_"), ("share_memory", "resize_")):
            if first in before and then in template:
                return None
        needs = {"t": tensors, "u": tensors, "m": modules, "o": modules}
        if any(f"{{{place}}}" in template and not pool for place, pool in needs.items()):
            return None
        rng = self.rng
        self.count += 1
        return template.format(
            t=rng.choice([name for name in tensors if not (edits and _overlaps(self.scope[name]))] or [""]), u=rng.choice(tensors or [""]), m=rng.choice(modules or [""]),
            o=rng.choice(modules or [""]), v=f"v{self.count}", s=rng.choice(_SHAPES), d=rng.choice(_FLOATS),
            x=rng.choice([-1.5, 0.0, 0.25, 2.0, 3]), p=rng.choice([0.1, 0.5, 1.0]), n=rng.randrange(1, 24),
        )  # fmt: skip

    def add(self, text: str | None) -> None:
        """Run a statement, and keep it if PyTorch accepts it."""
        if text is None:
            return
        before = dict(self.scope)
        with _quietly():
            try:
                exec(text, self.scope)
            except Exception:
                self.scope.clear()
                self.scope.update(before)
                return
        if any(_is_tensor(held) and held.numel() > _MOST_ELEMENTS for held in self.scope.values()):
            self.scope.clear()
            self.scope.update(before)
            return
        self.lines.append(text)

    def statement(self) -> None:
        rng = self.rng
        kind = rng.choices(
            ("make", "one", "view", "edit", "read", "stream", "layer", "module"), (3, 4, 3, 7, 1.5, 1, 2.5, 5)
        )[0]
        if kind in ("make", "one", "view", "layer"):
            pool = {
                "make": _MAKE + (_DRAWN if "g" in self.scope else []),
                "one": _OF_ONE,
                "view": _VIEWS,
                "layer": _LAYERS,
            }[kind]
            text = self.fill(rng.choice(pool))
            text = text and f"v{self.count} = {text}"
        else:
            text = self.fill(
                rng.choice({"edit": _EDITS, "read": _READS, "stream": _STREAM, "module": _ON_MODULES}[kind]),
                edits=kind == "edit",
            )
        if text and rng.random() < (0.6 if kind == "edit" else 0.1):
            text = f"{rng.choice(_WRAPS)}\n{_indented(text)}"
        self.add(text)


def _overlaps(held: torch.Tensor) -> bool:
    """Whether several elements share a memory location, which makes in-place operations undefined."""
    reach = 1 + sum((n - 1) * s for n, s in zip(held.shape, held.stride(), strict=True))
    return held.layout == torch.strided and 0 < reach < held.numel()


def _is_tensor(held: Any) -> bool:
    return isinstance(held, torch.Tensor) and not isinstance(held, torch.nn.parameter.UninitializedTensorMixin)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


@contextlib.contextmanager
def _quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Holder(torch.nn.Module):
    """A module that holds a constructor's tensors."""

    def __init__(self, variables: dict[str, Any]) -> None:
        super().__init__()
        for name, value in variables.items():
            if isinstance(value, (torch.Tensor, torch.nn.Module, list, tuple, dict, int, float, str, np.ndarray)):
                setattr(self, name, value)


def generate(seed: int) -> str:
    """The program of `seed`, always the same text with the same PyTorch version."""
    rng = random.Random(f"constructors {seed}")
    state, array_state = torch.get_rng_state(), np.random.get_state()
    seed_all(seed)
    try:
        draft = _Draft(rng)
        draft.add(draft.fill(f"v0 = {rng.choice(_LAYERS)}"))
        for _ in range(rng.choice((3, 6, 10, 15, 25))):
            draft.statement()
        body = draft.lines
        after: list[str] = []
        if rng.random() < 0.4:
            after = [text for _ in range(rng.choice((1, 2, 3))) if (text := draft.fill(rng.choice(_AFTER_ONLY)))]
        if rng.random() < 0.15:  # last: ends the sharing of memory
            after.append("if fl.is_deferred(model):\n    model.to_empty(device='cpu')")
    finally:
        torch.set_rng_state(state)
        np.random.set_state(array_state)
    return "\n".join(
        [
            _HEAD.rstrip(), "", f"SEED = {seed}", f"HOW = {rng.choice(_HOWS)!r}", "", "", "def build():", "    numbers = []",
            *(_indented(text) for text in body), "    return Holder(locals())", "", "", "def after(model, deferred):",
            *(_indented(text) for text in after), "    return model", "",
        ]
    )  # fmt: skip


_HOWS = ["whole", "whole", "one by one", "buffers first", "one thread"]


def _materialize(model: torch.nn.Module, how: str) -> None:
    if how == "one by one":
        tensors = [tensor for _, tensor, _ in _named(model)]
        random.Random(0).shuffle(tensors)
        for tensor in tensors:
            fl.materialize_tensor(tensor)
    elif how == "buffers first":
        fl.materialize_module(model, buffers_only=True)
    fl.materialize_module(model, num_threads=1 if how == "one thread" else None)


def _named(model: torch.nn.Module) -> list[Any]:
    from firstloss.capture.deferred import named_tensors

    return list(named_tensors(model))


def _run(scope: dict[str, Any], deferred: bool) -> tuple[Any, bytes]:
    seed_all(scope.get("SEED", 0))
    module = fl.deferred_init(scope["build"]) if deferred else scope["build"]()
    module = scope["after"](module, deferred)
    return module, torch.get_rng_state().numpy().tobytes()


def check(source: str, traceback: bool = False) -> Outcome:
    """Run a program eagerly and deferred, and compare."""
    name = "<constructor>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    own, arrays, threads = torch.get_rng_state(), np.random.get_state(), torch.get_num_threads()
    torch.set_num_threads(1)  # sums are split among threads
    try:
        with _quietly():
            return _checked(functools.partial(_scope, source, name), traceback)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(own)
        np.random.set_state(arrays)


def _scope(source: str, name: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"Holder": Holder, "SOURCE": source, "__name__": "constructor"}
    exec(compile(source, name, "exec"), scope)
    return scope


def _checked(scope: Callable[[], dict[str, Any]], traceback: bool) -> Outcome:
    try:
        expected, state = _run(scope(), deferred=False)
        again, _ = _run(scope(), deferred=False)
        assert_same(expected, again)  # not deterministic in eager PyTorch either
    except (Exception, AssertionError) as error:
        return Outcome(DISCARDED, f"{type(error).__name__}: {error}".splitlines()[0])
    try:
        program = scope()
        actual, actual_state = _run(program, deferred=True)
        if actual_state != state:
            return Outcome(DIFFERS, "the generator does not stand where eager leaves it")
        _materialize(actual, program["HOW"])
        if torch.get_rng_state().numpy().tobytes() != state:
            return Outcome(DIFFERS, "materializing moved the generator")
        if "model.to_empty" in program["SOURCE"]:  # gives tensors that shared memory separate memory
            for (name, a), (_, b) in zip(tensors_of(expected), tensors_of(actual), strict=True):
                assert bytes_of(a) == bytes_of(b), f"{name}: values differ"
        else:
            assert_same(expected, actual)
        if repr(getattr(expected, "numbers", None)) != repr(getattr(actual, "numbers", None)):
            return Outcome(DIFFERS, f"numbers: {actual.numbers} where eager has {expected.numbers}"[:300])
    except AssertionError as error:
        if traceback:
            tracebacks.print_exc()
        return Outcome(DIFFERS, " ".join(str(error).split())[:300])
    except RecursionError:  # a module within itself, for which some of these fail
        return Outcome(DISCARDED, "RecursionError")
    except Exception as error:
        if traceback:
            tracebacks.print_exc()
        lines = [f for f in tracebacks.extract_tb(error.__traceback__) if f.filename == "<constructor>"]
        where = f"line {lines[-1].lineno}: {lines[-1].line}" if lines else ""
        ours_too = isinstance(error, fl.errors.FirstlossError)
        return Outcome(
            REFUSED if ours_too else FOREIGN, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", where
        )
    return Outcome(SAME)
