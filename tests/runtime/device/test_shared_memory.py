"""Access to the memory of a tensor on the backend without PyTorch's dispatcher behaves as in eager PyTorch.

Each case runs one program eagerly and on the backend: code accesses a tensor's memory in one of several ways, for one
kind of tensor, at some time, and keeps reading and editing it between steps.
"""

import copy
import ctypes
import gc
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.lower import segments
from firstloss.runtime.step.segmented import SegmentedStep
from tests import compiled_steps
from tests.tiny_llama import llama

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

NUMPYS = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.int16, torch.int64: np.int64}


# -- ways to access a tensor's memory: each returns a NumPy array of it
# -------------------------------------------------


def _at(address, like):
    """An array at a raw address, laid out like `like`: as C++ would use a pointer."""
    kind = np.dtype(NUMPYS[like.dtype])
    if not like.numel():
        return np.empty(tuple(like.shape), kind)
    span = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    flat = np.frombuffer((ctypes.c_char * (span * like.itemsize)).from_address(address), kind)
    strides = [s * like.itemsize for s in like.stride()]
    return np.lib.stride_tricks.as_strided(flat, tuple(like.shape), strides)


def _bits(t):
    """The tensor in a dtype that NumPy supports."""
    return t.view(torch.int16) if t.dtype == torch.bfloat16 else t


def _of_storage(t, storage):
    real = torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), tuple(t.shape), t.stride())
    return _bits(real).numpy()


WAYS = {
    "numpy": lambda t: _bits(t).numpy(),
    "numpy(force=True)": lambda t: _bits(t).numpy(force=True),
    "np.asarray": lambda t: np.asarray(_bits(t)),
    "__array__": lambda t: _bits(t).__array__(),
    "__dlpack__": lambda t: np.from_dlpack(_bits(t)),
    "torch.from_dlpack": lambda t: _bits(torch.from_dlpack(t)).numpy(),
    "to_dlpack": lambda t: _bits(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t))).numpy(),
    "data_ptr": lambda t: _at(t.data_ptr(), t),
    "untyped_storage": lambda t: _of_storage(t, t.untyped_storage()),
    "untyped_storage().data_ptr()": lambda t: _at(
        t.untyped_storage().data_ptr() + t.storage_offset() * t.itemsize * bool(t.numel()), t
    ),
    "storage": lambda t: _of_storage(t, t.storage().untyped()),
    "storage().data_ptr()": lambda t: _at(
        t.storage().data_ptr() + t.storage_offset() * t.itemsize * bool(t.numel()), t
    ),
    "set_": lambda t: _bits(torch.empty(0, dtype=t.dtype).set_(t)).numpy(),
    "an alias's numpy": lambda t: _bits(t.data).numpy(),
    "memoryview": lambda t: np.asarray(memoryview(_bits(t).numpy())),
    "torch.from_numpy": lambda t: torch.from_numpy(_bits(t).numpy()).numpy(),
    "a flat view": lambda t: _bits(t.reshape(-1)).numpy() if t.is_contiguous() else _bits(t).numpy(),
}


# -- kinds of tensor --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """One tensor of each kind that a step changes, and some that it only reads."""

    def __init__(self):
        super().__init__()
        self.big = nn.Parameter(torch.randn(160, 128))  # more than 64 KiB: memory owned by the device
        self.small = nn.Parameter(torch.randn(4, 3))
        self.column_major = nn.Parameter(torch.randn(3, 5).t())
        self.big_column_major = nn.Parameter(torch.randn(128, 160).t())
        self.bf16 = nn.Parameter(torch.randn(6, 4).bfloat16())
        self.f64 = nn.Parameter(torch.randn(7).double())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.randn(1, 5, 1))
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(12).reshape(3, 4))

    def forward(self, x):
        self.count += 1
        self.table += self.count
        total = sum((p.float() * x).square().sum() for p in self.parameters())
        return total * 1e-3


KINDS = {
    "float32": lambda m: m.small.detach(),
    "64 KiB and more": lambda m: m.big.detach(),
    "a row": lambda m: m.big.detach()[3],
    "a slice with an offset and gaps": lambda m: m.small.detach()[1:, ::2],
    "transposed": lambda m: m.small.detach().t(),
    "one element": lambda m: m.small.detach()[2, 1],
    "expanded": lambda m: m.scalar.detach().expand(3, 2),
    "column-major": lambda m: m.column_major.detach(),
    "column-major, 64 KiB": lambda m: m.big_column_major.detach(),
    "bfloat16": lambda m: m.bf16.detach(),
    "float64": lambda m: m.f64.detach(),
    "0-dim": lambda m: m.scalar.detach(),
    "empty": lambda m: m.empty.detach(),
    "dimensions of one": lambda m: m.one.detach(),
    "a frozen weight": lambda m: m.frozen.data,
    "a buffer": lambda m: m.table,
    "a 0-dim buffer": lambda m: m.count,
    "of state_dict()": lambda m: m.state_dict()["small"],
    "an empty slice": lambda m: m.small.detach()[1:1],
}


class Run:
    def __init__(self, backend=None, optimizer=lambda p: torch.optim.SGD(p, 0.25), make=Net):
        torch.manual_seed(0)
        if backend is None:
            self.model = self.compiled = make()
        else:
            with backend.device:
                self.model = make()
            self.compiled = fl.compile(self.model, backend)
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.step = self._step if backend is None else fl.trace(self._step)
        self.x = torch.tensor(1.5)

    def _step(self, x):
        loss = self.compiled(x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def close(traced, eager, what=""):
    # A step's sums in another order: a few units in the last place of float32, and of bfloat16.
    half = traced.dtype == np.int16
    if half:
        traced, eager = (torch.from_numpy(a.copy()).view(torch.bfloat16).float().numpy() for a in (traced, eager))
    np.testing.assert_allclose(traced, eager, rtol=1e-2 if half else 1e-5, atol=1e-6, err_msg=what)


def _edit(held):
    """Edit writable arrays through NumPy."""
    if held.size and held.flags.writeable and 0 not in held.strides:
        held[...] = (
            held + 3
            if held.dtype.kind == "i" and held.dtype != np.int16
            else held * 0 + (16256, 1)[held.dtype.kind == "f"]
        )


def program(run, way, moment):
    """The values seen by code that gets memory of all kinds at `moment`, keeps it, and edits it between steps."""
    if moment != "before the first step":
        loss = run.step(run.x)
        if moment == "between steps":
            loss.item()
    held = {kind: way(of(run.model)) for kind, of in KINDS.items()}
    seen = []

    def look(when):
        seen.extend((f"{kind}, {when}", array.copy()) for kind, array in held.items())

    look("when it was taken")
    run.step(run.x)
    look("after a step")  # which may still be running
    for kind, array in held.items():
        _edit(array)
        seen.append((f"{kind}, by PyTorch, edited", _bits(KINDS[kind](run.model)).clone().numpy()))
    run.step(run.x)
    look("after an edit and a step")
    for of in KINDS.values():
        tensor = of(run.model)
        if 0 not in tensor.stride():
            tensor.mul_(2)
    look("after an edit by PyTorch")
    run.step(run.x)
    run.step(run.x)
    look("in the end")
    for kind, of in KINDS.items():
        seen.append((f"{kind}, taken again", way(of(run.model)).copy()))
        seen.append((f"{kind}, by PyTorch", _bits(of(run.model)).clone().numpy()))
    return seen


MOMENTS = ("before the first step", "between steps", "after a step that is under way")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture
def backend(folder):
    """A backend that compiles everything that the tests share once."""
    return fl.backend("XLA", artifact_dir=folder)


# One way at each time, and each of the others at one time.
OFTEN = [(way, MOMENTS[n % 3]) for n, way in enumerate(WAYS)] + [("numpy", moment) for moment in MOMENTS]


@pytest.mark.parametrize(
    "moment, way",
    [
        pytest.param(moment, way, marks=[pytest.mark.sweep] * ((way, moment) not in OFTEN))
        for moment in MOMENTS
        for way in WAYS
    ],
)
def test_numpy_and_pointers_show_the_weights_own_memory(backend, way, moment):
    eager = program(Run(), WAYS[way], moment)
    traced = program(Run(backend), WAYS[way], moment)
    for (what, a), (also, b) in zip(traced, eager, strict=True):
        assert what == also and a.dtype == b.dtype and a.shape == b.shape, what
        close(a, b, what)


# -- libraries that write a model to a file, and read it back ---------------------------------------------------------


class Tied(nn.Module):
    """Weights that share memory, fully and in part, and one with another layout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, 100)
        self.head = nn.Linear(100, 200, bias=False)
        self.head.weight = self.embed.weight
        self.middle = nn.Linear(100, 100)
        self.register_buffer("first_rows", self.middle.weight.detach()[:10])
        self.norm = nn.BatchNorm1d(100)
        self.bf16 = nn.Parameter(torch.randn(30).bfloat16())

    def forward(self, x):
        x = self.embed(torch.arange(8)) * x
        x = self.norm(torch.tanh(self.middle(x))) + self.first_rows.sum() + self.bf16.float().sum()
        return self.head(x).logsumexp(-1).mean()


def trained(backend=None, steps=3):
    run = Run(backend, lambda p: torch.optim.AdamW(p, 0.01), Tied)
    for _ in range(steps):
        run.step(run.x)  # the last step is still running
    return run


def _torch_save(obj, path):
    torch.save(obj, path / "a.pt")
    return torch.load(path / "a.pt", weights_only=False)


def _pickle(obj, path):
    return pickle.loads(pickle.dumps(obj))


def _checkpoint(obj, path):
    import torch.distributed.checkpoint as dcp

    dcp.save(obj, checkpoint_id=path / "dcp", no_dist=True)
    out = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in obj.items()}
    dcp.load(out, checkpoint_id=path / "dcp", no_dist=True)
    return out


def _numbers(state):
    return {name: value.detach().clone() for name, value in state.items()}


def _safetensors(obj, path):
    from safetensors.torch import load_file, save_file

    save_file({name: value for name, value in obj.items() if name not in ("head.weight", "first_rows")}, path / "a.st")
    return load_file(path / "a.st")


def _safetensors_bytes(obj, path):
    from safetensors.torch import load, save

    return load(save({name: value for name, value in obj.items() if name not in ("head.weight", "first_rows")}))


def _numpy_file(obj, path):
    arrays = {k: v.float().numpy() if v.dtype == torch.bfloat16 else v.numpy() for k, v in obj.items()}
    np.savez(path / "a.npz", **arrays)
    return {name: torch.from_numpy(array) for name, array in np.load(path / "a.npz").items()}


SAVERS = {
    "torch.save": _torch_save,
    "pickle": _pickle,
    "copy.deepcopy": lambda obj, path: copy.deepcopy(obj),
    "torch.distributed.checkpoint": _checkpoint,
    "safetensors save_file": _safetensors,
    "safetensors save": _safetensors_bytes,
    "np.savez": _numpy_file,
}


@pytest.mark.parametrize("saver", SAVERS)
def test_saved_values_are_current(backend, tmp_path, saver):
    run = trained(backend)
    loaded = SAVERS[saver](run.model.state_dict(), tmp_path)
    for name, value in loaded.items():
        assert torch.equal(value, run.model.state_dict()[name].clone().to(value.dtype)), name
    run.step(run.x).item()  # a copy is unchanged
    assert not torch.equal(loaded["middle.weight"], run.model.middle.weight.detach().clone())
    again = SAVERS[saver](run.model.state_dict(), tmp_path)
    assert again.keys() == loaded.keys()
    for name, value in again.items():
        assert torch.equal(value, run.model.state_dict()[name].clone().to(value.dtype)), name


def _sharing(state):
    """Which tensors share a storage."""
    groups = {}
    for name, value in state.items():
        groups.setdefault(value.untyped_storage().data_ptr(), set()).add(name)
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


@pytest.mark.parametrize("saver", ["torch.save", "pickle", "copy.deepcopy"])
def test_ties_and_views_are_saved_as_ties_and_views(backend, tmp_path, saver):
    traced, eager = trained(backend), trained()
    expected = _sharing(eager.model.state_dict())
    assert expected == [["embed.weight", "head.weight"], ["first_rows", "middle.weight"]]
    assert _sharing(traced.model.state_dict()) == expected
    loaded = SAVERS[saver](traced.model.state_dict(), tmp_path)
    also = SAVERS[saver](eager.model.state_dict(), tmp_path)
    assert _sharing(loaded) == _sharing(also)


@pytest.mark.parametrize("saver", ["torch.save", "pickle"])
def test_a_model_and_its_optimizer_can_be_saved(backend, tmp_path, saver):
    traced, eager = trained(backend), trained()
    (model, state), (also, other) = (
        SAVERS[saver]((run.model, run.optimizer.state_dict()), tmp_path) for run in (traced, eager)
    )
    assert [(n, type(p), p.requires_grad) for n, p in model.named_parameters()] == [
        (n, type(p), p.requires_grad) for n, p in also.named_parameters()
    ]
    assert model.head.weight is model.embed.weight
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor and torch.equal(value, traced.model.state_dict()[name].clone()), name
    assert state["state"].keys() == other["state"].keys()
    for i, entries in state["state"].items():
        for key, value in entries.items():
            now = traced.optimizer.state_dict()["state"][i][key]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(now).clone()), key


def test_safetensors_save_model_and_load_model_round_trip(backend, tmp_path):
    from safetensors.torch import load_model, save_model

    run = trained(backend)
    save_model(run.model, tmp_path / "m.safetensors")
    before = _numbers(run.model.state_dict())
    run.step(run.x)
    load_model(run.model, tmp_path / "m.safetensors")
    other = Tied()
    load_model(other, tmp_path / "m.safetensors")
    for name, value in before.items():
        assert torch.equal(run.model.state_dict()[name].clone(), value), name
        assert torch.equal(other.state_dict()[name], value), name
    assert run.model.head.weight is run.model.embed.weight
    want, actual = trained(), run
    eager = [want.step(want.x).item() for _ in range(2)]
    want.model.load_state_dict(before)
    assert [actual.step(actual.x).item() for _ in range(2)] and eager


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_save_pretrained_round_trips(backend, tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    with backend.device:
        model = llama(tie_word_embeddings=tied)
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.arange(10).reshape(2, 5)

    @fl.trace
    def step(tokens):
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = []
    for i in range(3):
        step(tokens)
        model.save_pretrained(tmp_path / str(i))
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / str(i))
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, model.state_dict()[name].clone()), name
        losses.append(loaded(input_ids=tokens, labels=tokens).loss.item())
        # float32, and the sums of a forward pass in another order
        assert losses[-1] == pytest.approx(step(tokens).item(), rel=1e-5)


# -- memory with other owners when a model is moved to the backend -----------------------------------------------------


def _numpy_parameter():
    array = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    module = nn.Linear(4, 3)
    module.weight = nn.Parameter(torch.from_numpy(array))
    return module, lambda: array


def _numpy_buffer():
    array = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    module = nn.Linear(4, 3)
    module.register_buffer("scale", torch.as_tensor(array))
    return module, lambda: array


def _numpy_of_weight():
    module = nn.Linear(4, 3)
    array = module.weight.detach().numpy()
    return module, lambda: array


def _part_of_numpy():
    array = np.linspace(-1, 1, 36, dtype=np.float32)
    module = nn.Linear(4, 3)
    module.weight = nn.Parameter(torch.from_numpy(array)[5:17].view(3, 4))
    return module, lambda: array


def _alias():
    module = nn.Linear(4, 3)
    alias = module.weight.detach()[1:]
    return module, lambda: alias.numpy()


def _storage():
    module = nn.Linear(4, 3)
    storage = module.weight.untyped_storage()
    return module, lambda: torch.empty(0).set_(storage, 0, (3, 4)).numpy()


def _one_vector():
    vector = torch.linspace(-1, 1, 20)
    module = nn.Linear(4, 3)
    module.weight = nn.Parameter(vector[2:14].view(3, 4))
    module.bias = nn.Parameter(vector[14:17])
    return module, lambda: vector.numpy()


def _attribute():
    module = nn.Linear(4, 3)
    module.shown = module.weight.detach().t()
    return module, lambda: module.shown.numpy()


def _frombuffer():
    memory = bytearray(np.linspace(-1, 1, 12, dtype=np.float32).tobytes())
    module = nn.Linear(4, 3)
    module.weight = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).view(3, 4))
    return module, lambda: np.frombuffer(memory, np.float32)


def _data_assigned():
    array = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    module = nn.Linear(4, 3)
    module.weight.data = torch.from_numpy(array)
    return module, lambda: array


HELD = {
    "a parameter on numpy's memory": _numpy_parameter,
    "a buffer on numpy's memory": _numpy_buffer,
    "numpy of a weight": _numpy_of_weight,
    "a part of numpy's memory": _part_of_numpy,
    "an alias that is no weight": _alias,
    "a storage": _storage,
    "two weights in one vector": _one_vector,
    "a view as an attribute": _attribute,
    "a bytearray": _frombuffer,
    "data = numpy's memory": _data_assigned,
}


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.inner = inner
        self.after = nn.Linear(3, 3)

    def forward(self, x):
        x = self.inner(self.before(x))
        if hasattr(self.inner, "scale"):
            x = x + self.inner.scale.sum()
        if hasattr(self.inner, "shown"):
            x = x + self.inner.shown.sum()
        return self.after(x)


@pytest.mark.parametrize("where", ["in the block", "in the block, at once", "before the block"])
@pytest.mark.parametrize("held", HELD)
def test_memory_shared_before_stays_shared(backend, held, where):
    def program(backend):
        torch.manual_seed(0)

        def make():
            inner, look = HELD[held]()
            return Around(inner), look

        if backend is not None and where != "before the block":
            backend.device.config.lazy_initialization = where == "in the block"
            try:
                with backend.device:
                    model, look = make()
            finally:
                backend.device.config.lazy_initialization = True
        else:
            model, look = make()
        compiled = model if backend is None else fl.compile(model, backend)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            loss = compiled(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        if backend is not None:
            step = fl.trace(step)
        seen = [look().copy()]
        for i in range(4):
            loss = step(torch.linspace(-1, 1, 8).view(2, 4))
            seen.append(look().copy())
            if i == 1:
                look()[...] *= 0.5
            if i == 2:
                with torch.no_grad():
                    model.inner.weight.add_(0.25)
            seen += [look().copy(), model.inner.weight.detach().clone().numpy(), np.array(loss.item())]
        return seen

    traced, eager = program(backend), program(None)
    for i, (a, b) in enumerate(zip(traced, eager, strict=True)):
        close(a, b, f"look {i}")


# -- `weight.data = ...` and `set_`: other memory ----------------------------------------------------------------------


def _swap_for_evaluation(m, held):
    """How exponential moving averages are swapped in."""
    backup = m.small.data
    m.small.data = torch.full((4, 3), 0.5)
    held += [m.small.detach().clone(), backup.clone()]
    m.small.data = backup


def _averaged(m, held):
    mean = m.small.detach().clone()
    m.small.data = mean
    mean.mul_(0.5)
    held += [m.small.detach().clone()]


def _kept_alias(m, held):
    before = m.small.detach()
    array = before.numpy()
    m.small.data = torch.ones(4, 3)
    m.small.data.mul_(3)
    held += [before.clone(), torch.from_numpy(array.copy())]


def _kept_array(m, held):
    array = m.small.detach().numpy()
    m.small.data = m.small.data * 2
    held += [torch.from_numpy(array.copy())]
    array[...] = 0
    held += [m.small.detach().clone()]


def _of_numpy(m, held):
    array = np.full((4, 3), 0.25, np.float32)
    m.small.data = torch.from_numpy(array)
    array[1] = 2
    held += [m.small.detach().clone()]
    m.small.data.add_(1)
    held += [torch.from_numpy(array.copy())]


def _of_one_vector(m, held):
    vector = torch.arange(30.0) / 30
    m.small.data = vector[3:15].view(4, 3)
    m.column_major.data = vector[15:30].view(3, 5).t()
    vector.neg_()
    held += [m.small.detach().clone(), m.column_major.detach().clone()]
    m.small.data.mul_(2)
    held += [vector.clone()]


def _other_strides(m, held):
    new = torch.arange(12.0).view(3, 4).t() / 12
    m.small.data = new
    new.mul_(0.5)
    held += [m.small.detach().clone()]


def _of_another_weight(m, held):
    m.one.data = m.frozen.data[:1, :5].unsqueeze(-1)
    m.frozen.data.add_(0.5)
    held += [m.one.detach().clone()]


def _set_storage(m, held):
    real = torch.linspace(0, 1, 12)
    m.small.data.set_(real.untyped_storage(), 0, (4, 3), (3, 1))
    held += [m.small.detach().clone()]


def _transposed_in_place(m, held):
    m.small.data = m.small.data.t().contiguous().t()
    held += [m.small.detach().clone()]


ASSIGNED = [
    _swap_for_evaluation,
    _averaged,
    _kept_alias,
    _kept_array,
    _of_numpy,
    _of_one_vector,
    _other_strides,
    _of_another_weight,
    _set_storage,
    _transposed_in_place,
]


@pytest.mark.parametrize("assign", ASSIGNED, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("steps", [0, 2])
def test_a_weight_can_get_other_memory(backend, assign, steps):
    def program(run):
        held = []
        for _ in range(steps):
            run.step(run.x)
        assign(run.model, held)
        for _ in range(2):
            run.step(run.x)
        held += [p.detach().clone() for p in run.model.parameters()]
        assign(run.model, held)
        run.step(run.x)
        return held + [p.detach().clone() for p in run.model.parameters()]

    traced, eager = program(Run(backend)), program(Run())
    for i, (a, b) in enumerate(zip(traced, eager, strict=True)):
        close(_bits(a).numpy(), _bits(b).numpy(), f"value {i}")


# -- real tensors on a weight's memory, in a step ---------------------------------------------------------------------


def _real_alias(m):
    return torch.from_numpy(m.small.detach().numpy())


IN_STEP = {
    "all of it": lambda t: t,
    "a view": lambda t: t[1:3, ::2],
    "transposed": lambda t: t.t(),
    "through DLPack": lambda t: torch.from_dlpack(t)[2],
}


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("view", IN_STEP)
def test_a_step_can_use_a_weight_and_a_real_alias(backend, view, write):
    def program(backend):
        run = Run(backend)
        real = IN_STEP[view](_real_alias(run.model))
        seen = []

        def step(x):
            loss = run.compiled(x)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            if write:
                real.mul_(0.5)
            return loss, real.sum(), real[0] * 2

        traced = step if backend is None else fl.trace(step)
        for _ in range(3):
            seen += [t.detach().clone().numpy() for t in traced(run.x)]
            seen.append(real.detach().clone().numpy())
            seen.append(run.model.small.detach().clone().numpy())
        return seen

    for i, (a, b) in enumerate(zip(program(backend), program(None), strict=True)):
        close(a, b, f"value {i}")


@pytest.mark.parametrize("begin, end", [(0, 20), (5, 20), (0, 10), (5, 10)])
def test_a_step_can_use_memory_that_contains_a_weight(backend, begin, end):
    """Compiled if the weight covers the whole tensor; if it covers a part, the step's Python runs at each call."""
    run = Run(backend)
    vector = torch.arange(30.0) / 30
    run.model.small.data = vector[3:15].view(4, 3)
    part, expected = vector[begin:end], 2 * vector[begin:end].sum().item() * run.x.item()
    doubled = vector.clone()
    doubled[3:15] *= 2
    computed = doubled[begin:end].sum().item() * run.x.item()

    @fl.trace
    def step(x):
        run.model.small.mul_(2)
        return part.sum() * x

    with torch.no_grad():
        if (begin, end) == (5, 10):
            assert step(run.x).item() == pytest.approx(expected, rel=1e-6)  # float32
            assert part.sum().item() * run.x.item() == pytest.approx(expected, rel=1e-6)  # float32
        else:
            with pytest.warns(fl.errors.EagerStepWarning, match="partly overlap in memory"):
                assert step(run.x).item() == pytest.approx(computed, rel=1e-6)  # float32


# -- cost and lifetime -------------------------------------------------------------------------------------------------


def test_released_memory_returns_to_the_device(backend):
    run = Run(backend)
    run.step(run.x)
    for hold in (lambda t: t.numpy(), torch.from_dlpack, lambda t: np.asarray(t)[1:], lambda t: pickle.dumps(t)):
        held = hold(run.model.big.detach())
        run.step(run.x)
        assert run.model.big._storage.resident.is_exported == (type(held) is not bytes)
        del held
        gc.collect()
        run.step(run.x)
        run.step(run.x)
        assert not run.model.big._storage.resident.is_exported
        assert run.model.big._storage.resident.current is not None  # the fast path of the next step
    address = run.model.big.data_ptr()
    for _ in range(3):
        run.step(run.x)
        assert run.model.big.data_ptr() == address == run.model.big.data.data_ptr()
        assert not run.model.small._storage.resident.is_exported


class Deep(nn.Module):
    """So many identical layers that the step is split into segments, whose first loss comes before the update."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU()) for _ in range(24)])
        self.double()  # float32 would amplify rounding differences through the layers

    def forward(self, x):
        return (self.layers(torch.linspace(-1, 1, 48, dtype=torch.float64) * x) - 1).square().mean()


@pytest.mark.parametrize("lasting", [False, True])
def test_segmented_steps_update_shared_memory(backend, monkeypatch, lasting):
    monkeypatch.setattr(segments, "_SAVED", 40)
    monkeypatch.setattr(segments, "LEAST_PERIODS_ON_CPU", 2)
    monkeypatch.setattr(segments, "_SHARE", 0.1)

    def program(backend):
        run = Run(backend, lambda p: torch.optim.SGD(p, 0.1, 0.9), make=Deep)
        held = [p.detach().numpy() for p in run.model.parameters()]
        addresses = [p.data_ptr() for p in run.model.parameters()] if lasting else []
        seen = []
        for i in range(4):
            loss = run.step(run.x)
            seen += [array.copy() for array in held]  # before the loss is waited for
            seen.append(np.array(loss.item()))
            if i == 1:
                for array in held[:7]:
                    array *= 0.5
        assert addresses in ([], [p.data_ptr() for p in run.model.parameters()])
        return run, seen

    (run, traced), (_, eager) = program(backend), program(None)
    assert isinstance(compiled_steps.latest(run.step).executable, SegmentedStep)
    for i, (a, b) in enumerate(zip(traced, eager, strict=True)):
        close(a, b, f"value {i}")


def test_memory_outlives_its_tensor(backend):
    run = Run(backend)
    run.step(run.x)
    array = run.model.big.detach().numpy()
    storage = run.model.small.untyped_storage()
    expected, other = array.copy(), bytes(storage)
    del run
    gc.collect()
    for _ in range(20):
        torch.full((160, 128), 7.0)
    assert np.array_equal(array, expected)
    assert bytes(storage) == other


def test_addresses_identify_tensors_as_in_eager(backend):
    traced, eager = trained(backend), trained()
    for read in (lambda t: t.data_ptr(), lambda t: t.untyped_storage().data_ptr(), lambda t: t.storage().data_ptr()):
        names = list(eager.model.state_dict())
        a, b = ([read(t) for t in run.model.state_dict().values()] for run in (traced, eager))
        assert [[x == y for x in a] for y in a] == [[x == y for x in b] for y in b], names
        assert 0 not in a


def test_gradients_share_memory_as_in_eager(backend):
    def program(backend):
        run = Run(backend)
        out = []

        def step(x):
            loss = run.compiled(x)
            loss.backward()
            return loss

        step = step if backend is None else fl.trace(step)
        for _ in range(3):
            step(run.x)
            grad = run.model.small.grad.numpy()
            out.append(grad.copy())
            grad *= 0.5
            run.optimizer.step()
            out += [grad.copy(), run.model.small.detach().clone().numpy()]
        return out

    for i, (a, b) in enumerate(zip(program(backend), program(None), strict=True)):
        close(a, b, f"value {i}")


def test_results_share_memory_as_in_eager(backend):
    run = Run(backend)
    results = [run.step(run.x).detach().numpy() for _ in range(3)]
    assert len({float(r) for r in results}) == 3
    loss = run.step(run.x)
    kept = loss.detach().numpy()
    kept += 1
    assert loss.item() == kept.item()


def test_memory_can_be_shared_between_processes(backend):
    run = Run(backend)
    run.step(run.x)
    before = run.model.small.detach().clone()
    run.model.share_memory()
    assert run.model.small.is_shared()
    torch.testing.assert_close(run.model.small.detach().clone(), before, rtol=0, atol=0)
    address = run.model.small.data_ptr()
    seen = _at(address, run.model.small)
    run.step(run.x)
    assert run.model.small.data_ptr() == address
    assert np.array_equal(seen, run.model.small.detach().clone().numpy())
    assert not np.array_equal(seen, before.numpy())


# -- errors as in eager PyTorch ----------------------------------------------------------------------------------------

REFUSED = {
    "numpy": lambda t: t.numpy(),
    "np.asarray": np.asarray,
    "__dlpack__": lambda t: t.__dlpack__(),
    "torch.from_dlpack": torch.from_dlpack,
    "bfloat16": lambda t: t.detach().bfloat16().numpy(),
    "another dtype without a copy": lambda t: np.asarray(t.detach(), np.float64, copy=False),
    "memoryview": memoryview,
}


@pytest.mark.parametrize("what", REFUSED)
def test_accesses_that_eager_refuses_are_refused(backend, what):
    with pytest.raises((TypeError, ValueError, RuntimeError, BufferError)) as eager:
        REFUSED[what](Run().model.small)
    with pytest.raises(eager.type):
        REFUSED[what](Run(backend).model.small)


def test_c_code_gets_no_null_pointer(backend):
    """C++ that gets the tensor itself, which cannot be intercepted."""
    tensor = Run(backend).model.small
    for take in (torch._C.TensorBase.data_ptr, torch._C._to_dlpack):
        with pytest.raises(RuntimeError, match="data pointer"):
            take(tensor.detach())
    with pytest.raises(RuntimeError, match="data pointer"):
        torch._C.TensorBase.untyped_storage(tensor).data_ptr()


def test_c_code_gets_a_materialized_tensor():
    torch.manual_seed(0)
    expected = Net().small
    torch.manual_seed(0)
    tensor = fl.deferred_init(Net).small
    with pytest.raises(RuntimeError, match="data pointer"):
        torch._C._to_dlpack(tensor.detach())
    assert torch._C.TensorBase.data_ptr(tensor) == tensor.data_ptr()
    assert torch.equal(tensor, expected)


# -- deferred, without a backend ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_deferred_tensors_become_real(way):
    torch.manual_seed(0)
    eager = Net()
    torch.manual_seed(0)
    traced = fl.deferred_init(Net)
    for kind, of in KINDS.items():
        held, expected = WAYS[way](of(traced)), WAYS[way](of(eager))
        assert np.array_equal(held, expected), kind
        _edit(held), _edit(expected)
        assert torch.equal(of(traced), of(eager)), kind
        assert np.array_equal(held, expected), kind


@pytest.mark.parametrize("saver", [s for s in SAVERS if s != "copy.deepcopy"])
def test_deferred_models_are_saved_like_eager_ones(tmp_path, saver):
    torch.manual_seed(0)
    expected = Tied().state_dict()
    torch.manual_seed(0)
    for name, value in SAVERS[saver](fl.deferred_init(Tied).state_dict(), tmp_path).items():
        assert torch.equal(value, expected[name].to(value.dtype)), name
