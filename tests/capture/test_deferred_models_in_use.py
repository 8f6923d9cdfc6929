"""What libraries and scripts do with a model gives bit-identical results with a deferred one."""

import copy
import io
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves

import firstloss as fl
from firstloss.errors import MaterializeError
from tests import forked

X = torch.tensor([1, 2, 3, 4])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=0)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("mask", torch.ones(4, 4).tril().bool(), persistent=False)

    def forward(self, tokens):
        return self.head(self.norm(F.relu(self.linear(self.embedding(tokens)))))


USES = {}


def use(function):
    USES[function.__name__] = function
    return function


def named(**uses):
    """Uses of a model by name: each returns its result or changes the model."""
    USES.update(uses)


def weights(model):
    return model.state_dict()


def without_gradients(edit):
    def run(model):
        with torch.no_grad():
            edit(model)
        return weights(model)

    return run


named(
    state=weights,
    clones=lambda m: {name: held.clone() for name, held in weights(m).items()},
    pickled=lambda m: weights(pickle.loads(pickle.dumps(m))),
    copied=lambda m: weights(copy.deepcopy(m)),
    vector=lambda m: nn.utils.parameters_to_vector(m.parameters()),
    lists=lambda m: (m.linear.bias.tolist(), m.linear.weight[0, 0].item(), m.frequencies[1].item()),
    half=lambda m: weights(m.half()),
    double=lambda m: weights(m.double()),
    bfloat16=lambda m: weights(m.to(torch.bfloat16)),
    by_type=lambda m: (weights(m.type(torch.float64)), m.linear.weight.type()),
    calls=lambda m: m(X),
    evaluates=lambda m: m.eval()(X),
    in_inference_mode=lambda m: torch.inference_mode()(m)(X),
    in_autocast=lambda m: torch.autocast("cpu", dtype=torch.bfloat16)(m)(X),
    with_one_weight=lambda m: torch.func.functional_call(m, {"linear.bias": torch.ones(8)}, (X,)),
    stacked=lambda m: torch.func.stack_module_state([m, copy.deepcopy(m)])[0],
    mapped=lambda m: torch.vmap(lambda x: m.linear(x))(torch.ones(3, 8)),
    averaged=lambda m: weights(AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9))),
    pruned=lambda m: (prune.l1_unstructured(m.linear, "weight", amount=0.5), weights(m))[1],
    weight_norm=lambda m: (parametrizations.weight_norm(m.linear), weights(m))[1],
    spectral_norm=lambda m: (parametrizations.spectral_norm(m.linear), weights(m))[1],
    orthogonal=lambda m: (parametrizations.orthogonal(m.linear), weights(m), m.linear.weight)[1:],
    fused=lambda m: weights(torch.nn.utils.fuse_linear_bn_eval(m.eval().linear, m.norm)),
    symbolic=lambda m: torch.fx.symbolic_trace(m)(X),
    parallel=lambda m: nn.DataParallel(m)(X),
    shared=lambda m: (weights(m.share_memory()), m.linear.weight.is_shared()),
    sequential=lambda m: nn.Sequential(m.embedding, m.linear)(X),
    without_modules=lambda m: sum(p.sum() for p in m.parameters()),
    together=lambda m: torch.cat([p.flatten() for p in m.parameters()]),
    norms=lambda m: torch._foreach_norm(list(m.parameters())),
    statistics=lambda m: (torch.histc(m.linear.weight.detach(), 5), m.linear.weight.std()),
    shown=lambda m: (repr(m.linear.weight), str(m.frequencies), str(m)),
    the_same=lambda m: (torch.equal(m.embedding.weight, m.head.weight), m.embedding.weight is m.head.weight),
    addresses=lambda m: len({p.data_ptr() for p in m.parameters()}),
    bytes=lambda m: m.linear.weight.detach().untyped_storage().tolist(),
    other_dtype=lambda m: m.linear.weight.detach().view(torch.int32),
    rows=lambda m: [row.sum().item() for row in m.linear.weight],
    contained=lambda m: (1.0 in m.norm.weight, bool(m.mask.any())),
    strided=lambda m: m.linear.weight.as_strided((3, 3), (8, 1), 2),
    singular_values=lambda m: torch.linalg.svdvals(m.linear.weight),
    of_numpy=lambda m: (np.asarray(m.linear.weight.detach()).tobytes(), memoryview(m.frequencies.numpy()).tobytes()),
    dlpack=lambda m: torch.from_dlpack(m.linear.weight.detach()),
    frozen=lambda m: (weights(m.requires_grad_(False)), [p.requires_grad for p in m.parameters()]),
    weakly=lambda m: (weakref.ref(m.linear.weight)() is m.linear.weight, m(X)),
    of_meta=lambda m: [(p.shape, str(p.device)) for p in m.to("meta").parameters()],
    tensors_of_lists=lambda m: torch.tensor([m.frequencies[0], m.frequencies[1]]),
    tensors_of_rows=lambda m: torch.tensor([[m.linear.bias[0], 2], [m.frequencies[1], 3.5]], dtype=torch.float64),
    as_tensors_of_lists=lambda m: torch.as_tensor([m.linear.bias[0], m.norm.running_var[1]]),
    arrays_of_lists=lambda m: torch.asarray([m.linear.bias[0], m.norm.running_var[1]]),
    new_tensors_of_lists=lambda m: torch.ones(1, dtype=torch.float64).new_tensor([m.frequencies[0], 1]),
    that_require_gradients=lambda m: torch.tensor([m.frequencies[0], 1.0], requires_grad=True),
    reset=lambda m: (m.linear.reset_parameters(), m.norm.reset_running_stats(), weights(m))[2],
    initialized=lambda m: (nn.init.xavier_uniform_(m.linear.weight), weights(m))[1],
    multiplied=lambda m: (m.linear.weight.data.mul_(2), weights(m))[1],
    of_data=lambda m: (setattr(m.linear.weight, "data", torch.ones(8, 8)), weights(m))[1],
    set_anew=lambda m: (setattr(m, "frequencies", torch.ones(4)), weights(m))[1],
    deleted=lambda m: (delattr(m, "frequencies"), weights(m))[1],
    filled_in_place=without_gradients(lambda m: m.embedding.weight[3].fill_(7)),
    doubled_rows=without_gradients(lambda m: m.embedding.weight[1:3].mul_(2)),
    masked=without_gradients(lambda m: m.linear.weight.__setitem__(m.linear.weight > 0, float("nan"))),
    set_to=without_gradients(lambda m: m.linear.weight.set_(torch.ones(8, 8))),
    swapped=without_gradients(lambda m: torch.utils.swap_tensors(nn.Parameter(torch.ones(8, 8)), m.linear.weight)),
    loaded=lambda m: (m.load_state_dict({k: torch.full_like(v, 2) for k, v in weights(m).items()}), weights(m))[1],
    loaded_in_part=lambda m: (m.load_state_dict({"linear.bias": torch.ones(8)}, strict=False), weights(m))[1],
)


@use
def saved(m):
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return weights(torch.load(file, weights_only=False))


@use
def copies_apart(m):
    first, second = copy.deepcopy(m), copy.deepcopy(m)
    with torch.no_grad():
        first.linear.weight.add_(1)
    return weights(first), weights(second), weights(m)


@use
def from_a_vector(m):
    nn.utils.vector_to_parameters(torch.arange(float(sum(p.numel() for p in m.parameters()))), m.parameters())
    return weights(m)


@use
def edited_by_numpy(m):
    m.linear.weight.detach().numpy()[0] = 5
    return weights(m)


@use
def gradients(m):
    m(X).square().sum().backward()
    return nn.utils.clip_grad_norm_(m.parameters(), 0.1), [p.grad for p in m.parameters()]


@use
def functional_gradients(m):
    own = dict(m.eval().named_parameters())
    return torch.func.grad(lambda weights: torch.func.functional_call(m, weights, (X,)).sum())(own)


@use
def of_second_order(m):
    optimizer = torch.optim.LBFGS(m.parameters())

    def closure():
        optimizer.zero_grad()
        loss = m(X).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure), weights(m)


@use
def larger(m):
    old, m.embedding = m.embedding, nn.Embedding(12, 8)
    with torch.no_grad():
        m.embedding.weight[:10] = old.weight
    return weights(m)


@use
def wrapped(m):
    class LowRank(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down, self.up = base, nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.zeros(2, 8))

        def forward(self, x):
            return self.base(x) + x @ self.down @ self.up

    m.linear = LowRank(m.linear)
    return weights(m), m(X)


@use
def hooked(m):
    seen = []
    m.linear.register_forward_hook(lambda *_: seen.append(m.linear.weight.sum().item()))
    m.linear.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    m(X).sum().backward()
    return seen


@use
def in_a_thread(m):
    results = []
    thread = threading.Thread(target=lambda: results.append(m(X)))
    thread.start()
    thread.join()
    return results


@use
def a_gradient_that_is_assigned(m):
    m.linear.weight.grad = torch.ones(8, 8)
    return m.linear.weight.grad, copy.deepcopy(m).linear.weight.grad


def outcome(use, make):
    torch.manual_seed(3)
    model = make()
    torch.manual_seed(4)
    results = []
    for leaf in tree_leaves(use(model)):
        if isinstance(leaf, torch.Tensor):
            content = leaf.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            results.append((tuple(leaf.shape), leaf.dtype, leaf.requires_grad, content))
        else:
            results.append(leaf)
    return results, torch.rand(1).item()


@pytest.mark.parametrize("name", USES)
@pytest.mark.filterwarnings("ignore")
def test_uses_of_a_deferred_model_match_eager(name):
    assert outcome(USES[name], lambda: fl.deferred_init(Net)) == outcome(USES[name], Net)


@pytest.mark.filterwarnings("ignore")
def test_torch_jit_trace_of_a_deferred_model_is_refused():
    """PyTorch holds traced tensors by weak references in C++, so no other tensor can replace them."""
    torch.manual_seed(3)
    model = fl.deferred_init(Net)
    with pytest.raises(MaterializeError, match="firstloss.materialize_module"):
        torch.jit.trace(model.eval(), (X,))


def test_a_default_device_applies_to_patched_functions():
    """PyTorch looks these functions up when `torch.device` is first used as a context, here while they are patched."""
    code = """if True:
        import torch, firstloss as fl
        with fl.deferred():
            with torch.device("cpu"):
                torch.empty(0)
        with torch.device("meta"):
            assert torch.tensor([1.0]).is_meta and torch.asarray([1.0]).is_meta
    """
    done = forked.run(["-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr
