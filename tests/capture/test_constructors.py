"""Constructors of every kind: deferred construction is bit-identical to eager construction."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from tests.capture.eager_comparison import assert_same_as_eager

CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


class Holder(nn.Module):
    """A module with the given buffers (tensors), parameters and plain attributes."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value, persistent=not name.startswith("np_"))
            else:
                setattr(self, name, value)


def mlp(width=8):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.LayerNorm(width))


# -- views, edits in place, .data ----------------------------------------------------------------------------------


@case
def a_view_edited_in_place():
    weight = torch.randn(6, 8)
    weight[2:4, ::2].mul_(3).add_(1)
    weight.t()[1].zero_()
    weight.view(-1)[5] = 7.0
    return Holder(weight=weight, tail=weight[4:])


@case
def views_share_memory_with_their_base():
    base = torch.empty(4, 6)
    nn.init.normal_(base)
    q, k, v = base.chunk(3, dim=1)
    q.fill_(1)
    nn.init.uniform_(v)
    return [base, q, k, v, base.unsqueeze(0), base.diagonal(), base.unfold(1, 2, 2), base.expand(2, 4, 6)]


@case
def a_normal_fill_through_a_strided_view():
    base = torch.zeros(20, 20)
    base[:, ::2].normal_()
    base.t()[3:5].uniform_()
    return Holder(base=base)


@case
def data_edited():
    layer = nn.Linear(5, 7)
    layer.weight.data.normal_(0, 0.02)
    layer.bias.data.zero_()
    layer.weight.data[0].fill_(2)
    layer.bias.data += 1
    return layer


@case
def data_assigned():
    layer = nn.Linear(5, 7)
    layer.weight.data = torch.randn(7, 5, dtype=torch.float64)
    layer.bias.data = layer.weight.data[:, 0]
    return layer


@case
def data_assigned_from_numpy():
    layer = nn.Linear(3, 3)
    layer.weight.data = torch.from_numpy(np.eye(3, dtype=np.float32))
    layer.weight.data.mul_(2)
    return layer


@case
def edits_under_no_grad():
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.mul_(0.1)
        layer.weight[0] = layer.weight[1] + layer.bias
        layer.bias.copy_(torch.arange(4))
        layer.weight += torch.eye(4)
    return layer


@case
def index_put_and_masked_fill():
    a = torch.randn(5, 5)
    a[torch.tensor([0, 2]), torch.tensor([1, 3])] = -1
    a[a.isnan()] = 0  # a boolean mask, as a value
    a.masked_fill_(torch.eye(5, dtype=torch.bool), 0.0)
    a.index_fill_(1, torch.tensor([4]), 2.0)
    a.scatter_(0, torch.zeros(1, 5, dtype=torch.long), 9.0)
    return Holder(a=a)


@case
def boolean_indexing():
    a = torch.randn(5, 5)
    return [a, a[a > 0], torch.nonzero(a > 0), a.masked_select(a < 0)]


@case
def nothing_is_written():
    torch.manual_seed(1)
    return Holder(a=torch.empty(3).zero_(), b=torch.ones(2))


@case
def transposed_weights():
    layer = nn.Linear(6, 4)
    other = nn.Module()
    other.weight = nn.Parameter(layer.weight.t())
    other.inner = layer
    other.copied = nn.Parameter(layer.weight.t().contiguous())
    return other


@case
def channels_last():
    conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    nn.init.kaiming_normal_(conv.weight)
    return conv


@case
def squeeze_and_friends_in_place():
    a = torch.randn(1, 4, 1)
    a.squeeze_().unsqueeze_(1)
    b = torch.randn(3, 5)
    b.t_()
    c = torch.randn(2, 3, 4)
    c.transpose_(0, 2)
    return [a, b, c]


@case
def resized_storage():
    a = torch.randn(3, 4)
    b = torch.empty(0)
    torch.add(a, 1, out=b)
    return [a, b]


@case
def out_arguments():
    a = torch.empty(2, 3)
    torch.randn(2, 3, out=a)
    b = torch.empty(2, 3)
    torch.mul(a, 2, out=b)
    torch.sin(torch.ones(2, 3), out=b[:, :])
    return [a, b]


# -- dtypes and devices --------------------------------------------------------------------------------------------


@case
def default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return mlp()
    finally:
        torch.set_default_dtype(before)


@case
def default_dtype_double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(mlp(), nn.Embedding(20, 3, padding_idx=2))
    finally:
        torch.set_default_dtype(before)


@case
def to_half():
    return mlp().half()


@case
def to_bfloat16():
    return nn.Sequential(mlp(), nn.BatchNorm1d(8)).bfloat16()


@case
def to_double_and_back():
    model = mlp().double()
    nn.init.normal_(model[0].weight)
    return model.float()


@case
def to_dtype_and_device():
    return mlp().to("cpu", torch.float16).to(torch.float32)


@case
def half_precision_fills():
    return [torch.randn(n, dtype=d) for n in (3, 16, 17, 100, 1000) for d in (torch.float16, torch.bfloat16)]


@case
def device_context():
    with torch.device("cpu"):
        return mlp()


@case
def device_argument():
    return nn.Linear(3, 4, device="cpu", dtype=torch.float64)


@case
def meta_inside():
    with torch.device("meta"):
        shape = nn.Linear(3, 4)
    real = nn.Linear(3, 4)
    return Holder(real=real, meta=shape)


@case
def meta_to_empty():
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    model.to_empty(device="cpu")
    model.reset_parameters()
    return model


@case
def complex_tensors():
    a = torch.randn(3, 4, dtype=torch.complex64)
    b = torch.view_as_real(a)
    b[..., 1] = 0
    c = torch.complex(torch.randn(3), torch.ones(3))
    d = torch.polar(torch.rand(4), torch.linspace(0, 1, 4))
    return [a, b, c, d, a.conj().mul(2), a.real, a.imag.clone(), torch.view_as_complex(torch.randn(5, 2))]


@case
def integers_and_booleans():
    return [
        torch.randint(0, 10, (5,)),
        torch.randint(3, (4,), dtype=torch.int8),
        torch.randperm(10),
        torch.zeros(3, dtype=torch.bool),
        torch.arange(5) > 2,
        torch.ones(3, dtype=torch.uint8) << 2,
        torch.empty(4, dtype=torch.int64).random_(),
        torch.empty(4, dtype=torch.int32).random_(5, 100),
        torch.triu(torch.full((4, 4), float("-inf")), 1),
        torch.tensor([[1, 2], [3, 4]]).bitwise_and(1),
    ]


@case
def zero_size_and_zero_dim():
    return [
        torch.empty(0, 5).normal_(),
        torch.tensor(3.0),
        torch.randn(()),
        torch.rand(()),
        nn.Parameter(torch.ones([]) * math.log(1 / 0.07)),
        nn.Linear(0, 3),
        torch.zeros(2, 0, 3),
        torch.randn(3)[1],
    ]


@case
def factories():
    return [
        torch.eye(3, 4),
        torch.linspace(0, 1, 7),
        torch.logspace(0, 2, 5),
        torch.arange(2, 9, 3),
        torch.arange(0.0, 1.0, 0.3, dtype=torch.float64),
        torch.tril(torch.ones(4, 4)).view(1, 1, 4, 4),
        torch.full((2, 3), 7),
        torch.full((2,), True),
        torch.empty_like(torch.ones(2)).fill_(3),
        torch.ones_like(torch.randn(2), dtype=torch.int32),
        torch.randn_like(torch.zeros(20)),
        torch.rand_like(torch.zeros(3)),
        torch.zeros(3).new_tensor([1.0, 2.0]),
        torch.randn(4).new_full((2,), 5.0),
        torch.tril_indices(3, 3),
        torch.hann_window(6),
        torch.tensor([1, 2, 3]),
        torch.as_tensor([1.5, 2.5]),
        torch.scalar_tensor(2.0),
        torch.cartesian_prod(torch.arange(2), torch.arange(3)),
    ]


@case
def rotary_tables():
    inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
    angles = torch.outer(torch.arange(16), inverse)
    table = torch.cat([angles, angles], dim=-1)
    return Holder(np_inverse=inverse, cos=table.cos(), sin=table.sin(), both=torch.stack([table.cos(), table.sin()]))


@case
def relative_position_index():
    coordinates = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
    relative = (coordinates[:, :, None] - coordinates[:, None, :]).permute(1, 2, 0).contiguous()
    relative[:, :, 0] += 2
    relative[:, :, 1] += 2
    relative[:, :, 0] *= 5
    index = torch.zeros(10, 10, dtype=relative.dtype)
    index[1:, 1:] = relative.sum(-1)
    index[0, 0:] = 27
    return Holder(index=index, table=nn.Parameter(torch.zeros(28, 4).normal_(std=0.02)))


@case
def sinusoidal_positions():
    table = torch.zeros(10, 6)
    position = torch.arange(0, 10).unsqueeze(1).float()
    div = torch.exp(torch.arange(0, 6, 2).float() * -(math.log(10000.0) / 6))
    table[:, 0::2] = torch.sin(position * div)
    table[:, 1::2] = torch.cos(position * div)
    return Holder(table=table)


# -- copies, ties, later changes ---------------------------------------------------------------------------------


@case
def deep_copies():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


@case
def ties_inside_a_deep_copy():
    model = mlp()
    model.append(nn.Linear(8, 16))
    model[4].weight = model[0].weight
    model.shown = model[0].weight.detach()[1:3]
    return [model, copy.deepcopy(model)]


@case
def deep_copied_then_edited():
    a = nn.Linear(4, 4)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.weight.add_(1)
        a.weight.zero_()
    return [a, b]


@case
def shallow_copies_and_clones():
    a = nn.Linear(4, 4)
    return [a, copy.copy(a), copy.copy(a.weight), a.weight.detach(), a.weight.detach().clone()]


@case
def ties():
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11, bias=False))
    model[1].weight = model[0].weight
    return model


@case
def ties_then_initialised_again():
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11, bias=False))
    model[1].weight = model[0].weight
    model.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if hasattr(m, "weight") else None)
    return model


@case
def applied_twice():
    def init(m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            nn.init.zeros_(m.bias)

    return mlp().apply(init).apply(init)


@case
def requires_grad_changed():
    model = mlp()
    model[0].requires_grad_(False)
    model[2].weight.requires_grad = False
    return model


@case
def parameters_made_from_parameters():
    a = nn.Parameter(torch.randn(3, 3))
    b = nn.Parameter(a)
    c = nn.Parameter(a.detach().clone(), requires_grad=False)
    return nn.ParameterList([a, b, c])


@case
def attributes_on_parameters():
    layer = nn.Linear(3, 3)
    layer.weight.tag = "row"
    layer.weight.no_decay = True
    assert layer.weight.tag == "row"
    return layer


@case
def tensors_in_containers():
    holder = nn.Module()
    holder.tables = [torch.randn(3), torch.ones(2)]
    holder.by_name = {"a": torch.rand(2), "deep": (torch.zeros(1), [torch.randn(20)])}
    holder.plain = torch.randn(17)
    holder.parameters_by_name = nn.ParameterDict({"x": nn.Parameter(torch.randn(2))})
    holder.list = nn.ParameterList([torch.randn(2), torch.zeros(1)])
    return holder


@case
def a_buffer_replaced():
    norm = nn.BatchNorm1d(4)
    norm.running_mean = torch.randn(4)
    norm.running_var[1] = 5
    norm.num_batches_tracked += 3
    return norm


@case
def submodules_replaced():
    model = mlp()
    model[0] = nn.Linear(8, 16, bias=False)
    del model[3]
    model.append(nn.GroupNorm(2, 8))
    return model


@case
def hooks_registered():
    model = mlp()
    model.register_forward_hook(lambda *a: None)
    model[0].weight.register_hook(lambda g: g)
    model[2].register_full_backward_hook(lambda *a: None)
    return model


# -- random streams ----------------------------------------------------------------------------------------------


@case
def seeded_inside():
    a = torch.randn(20)
    torch.manual_seed(5)
    b = torch.randn(20)
    torch.manual_seed(5)
    return [a, b, torch.randn(20), torch.rand(3)]


@case
def forked():
    a = torch.randn(20)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        b = torch.randn(5)
    return [a, b, torch.randn(20)]


@case
def state_saved_and_restored():
    state = torch.get_rng_state()
    a = torch.randn(40)
    torch.set_rng_state(state)
    b = torch.randn(40)
    later = torch.get_rng_state()
    torch.randn(7)
    torch.set_rng_state(later)
    return [a, b, torch.randn(9)]


@case
def a_generator_of_its_own():
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(33, generator=generator)
    b = torch.rand(5)
    c = torch.empty(20).normal_(generator=generator)
    d = torch.empty(6, 6)
    nn.init.xavier_normal_(d, generator=generator)
    return [a, b, c, d, torch.randperm(9, generator=generator), torch.randn(4)]


@case
def a_cloned_generator():
    generator = torch.Generator().manual_seed(4)
    torch.randn(5, generator=generator)
    other = torch.Generator()
    other.set_state(generator.get_state())
    a = torch.randn(5, generator=generator)
    clone = generator.clone_state() if hasattr(generator, "clone_state") else other
    return [a, torch.randn(5, generator=other), torch.randn(3, generator=clone), torch.randn(4)]


@case
def small_normals_and_their_spare():
    out = []
    for n in (1, 2, 3, 15, 1, 16, 5, 17, 1):
        out.append(torch.randn(n))
        out.append(torch.rand(n))
    return out


@case
def every_distribution():
    return [
        torch.empty(20).exponential_(),
        torch.empty(20).cauchy_(),
        torch.empty(20).log_normal_(),
        torch.empty(20).geometric_(0.3),
        torch.empty(20).bernoulli_(0.4),
        torch.bernoulli(torch.full((9,), 0.5)),
        torch.empty(5).random_(),
        torch.poisson(torch.full((8,), 3.0)),
        torch.normal(torch.zeros(20), torch.ones(20)),
        torch.normal(0.0, 2.0, (5, 5)),
        torch.normal(torch.zeros(3), 2.0),
        torch.multinomial(torch.ones(6), 3),
        torch.multinomial(torch.ones(6), 8, replacement=True),
        torch.distributions.Gamma(torch.ones(4), torch.ones(4)).sample(),
        torch.distributions.Dirichlet(torch.ones(4)).sample(),
        torch.distributions.Normal(torch.zeros(30), 1.0).sample(),
        torch.distributions.Uniform(torch.zeros(30), 1.0).sample(),
        torch.distributions.Categorical(torch.ones(4)).sample((3,)),
        torch.binomial(torch.full((4,), 10.0), torch.full((4,), 0.3)),
        nn.functional.dropout(torch.ones(50), 0.5),
        torch.randn(20),
    ]


@case
def numpy_and_python_randomness():
    a = torch.tensor(np.random.rand(3, 4), dtype=torch.float32)
    b = torch.from_numpy(np.random.randn(5))
    c = torch.full((2,), random.random())
    return Holder(a=a, b=b, c=c, layer=nn.Linear(random.randint(3, 5), 4))


@case
def numpy_array_edited_afterwards():
    array = np.zeros(4, dtype=np.float32)
    kept = torch.from_numpy(array)
    copied = torch.from_numpy(array).clone()
    doubled = torch.from_numpy(array) * 2
    array += 1
    return [nn.Parameter(kept), copied, doubled, kept + 1]


@case
def python_control_flow_on_values():
    depth = [round(x, 3) for x in torch.linspace(0, 0.3, 4).tolist()]
    layers = nn.ModuleList(nn.Linear(4, 4 + i) for i, _ in enumerate(depth))
    if layers[0].weight.sum() > 0:
        layers.append(nn.Linear(2, 2))
    else:
        layers.append(nn.Linear(3, 3))
    scale = layers[1].weight.abs().max().item()
    with torch.no_grad():
        layers[2].weight.mul_(scale)
    return layers


@case
def exceptions_caught_inside():
    try:
        torch.randn(3) @ torch.randn(4)
    except RuntimeError:
        pass
    try:
        torch.randn(3).view(2, 2)
    except RuntimeError:
        pass
    return nn.Linear(3, 3)


# -- modules that do more at construction --------------------------------------------------------------------------


@case
def embeddings():
    return nn.ModuleList(
        [
            nn.Embedding(20, 4, padding_idx=3),
            nn.Embedding(20, 4, padding_idx=-1),
            nn.Embedding.from_pretrained(torch.randn(5, 3)),
            nn.EmbeddingBag(9, 3, padding_idx=1),
            nn.EmbeddingBag(9, 3, mode="max"),
        ]
    )


@case
def recurrent():
    return nn.ModuleList(
        [
            nn.LSTM(4, 6, num_layers=2, bidirectional=True),
            nn.LSTM(4, 6, proj_size=3),
            nn.GRU(3, 5, batch_first=True),
            nn.RNN(3, 5),
            nn.LSTMCell(3, 4),
            nn.GRUCell(3, 4),
        ]
    )


@case
def attention_and_transformer():
    return nn.ModuleList(
        [
            nn.MultiheadAttention(8, 2),
            nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
            nn.Transformer(8, 2, 2, 2, 16),
        ]
    )


@case
def lazy_modules_left_uninitialized():
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyConv2d(3, 2))


@case
def lazy_modules_run_once():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))
    with torch.no_grad():
        model(torch.randn(5, 3))
    return model


@case
def a_forward_inside():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    with torch.no_grad():
        features = model(torch.zeros(2, 3, 8, 8)).shape[1]
    model.append(nn.Linear(features, 5))
    return model


@case
def a_forward_with_values_inside():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    with torch.no_grad():
        model(torch.randn(8, 4))
    return model


@case
def parametrized():
    layer = nn.Linear(4, 5)

    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).transpose(-1, -2)

    square = nn.Linear(4, 4)
    torch.nn.utils.parametrize.register_parametrization(square, "weight", Symmetric())
    torch.nn.utils.parametrizations.weight_norm(layer)
    return nn.ModuleList([layer, square])


@case
def spectral_norm_new():
    return torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))


@case
def spectral_norm_old():
    return torch.nn.utils.spectral_norm(nn.Conv2d(3, 4, 3))


@case
def weight_norm_old():
    return torch.nn.utils.weight_norm(nn.Conv1d(3, 4, 3), dim=2)


@case
def weight_norm_removed():
    layer = torch.nn.utils.weight_norm(nn.Linear(3, 4))
    torch.nn.utils.remove_weight_norm(layer)
    return layer


@case
def orthogonal_parametrization():
    return torch.nn.utils.parametrizations.orthogonal(nn.Linear(5, 5))


@case
def parametrization_removed():
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    return layer


@case
def pruned():
    layer = nn.Linear(6, 6)
    import torch.nn.utils.prune

    torch.nn.utils.prune.l1_unstructured(layer, "weight", amount=0.3)
    torch.nn.utils.prune.random_unstructured(layer, "bias", amount=2)
    return layer


@case
def flattened_vector():
    model = mlp()
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return model


@case
def state_dict_loaded():
    saved = {name: tensor.clone() for name, tensor in mlp().state_dict().items()}
    model = mlp()
    model.load_state_dict(saved)
    return model


@case
def state_dict_assigned():
    model = mlp()
    model.load_state_dict(mlp().state_dict(), assign=True)
    return model


@case
def state_dict_partly_loaded():
    model = mlp()
    model.load_state_dict({"0.weight": torch.ones(16, 8)}, strict=False)
    return model


@case
def from_another_state_dict_key_by_key():
    a, b = mlp(), mlp()
    for (_, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        p.data.copy_(q.data)
    return [a, b]


@case
def moving_average_copy():
    model = mlp()
    return torch.optim.swa_utils.AveragedModel(model)


@case
def linear_algebra():
    a = torch.randn(5, 5)
    q, r = torch.linalg.qr(a)
    u, s, v = torch.linalg.svd(a)
    return [q, r, u, s, v, a.inverse(), torch.linalg.norm(a), a @ a.T, torch.einsum("ij,jk->ik", a, a), a.trace()]


@case
def reductions_and_sorts():
    a = torch.randn(6, 4)
    return [
        *a.sort(dim=1),
        *a.topk(2),
        *a.max(dim=0),
        a.argmax(),
        a.cumsum(0),
        a.std(),
        a.var(0),
        a.median(),
        a.unique(),
    ]


@case
def split_with_sizes_and_unbind():
    a = torch.randn(6, 4)
    x, y = a.split([2, 4])
    rows = a.unbind(0)
    rows[3].zero_()
    return [a, x, y, *rows]


@case
def foreach_operations():
    tensors = [torch.randn(3), torch.randn(4)]
    torch._foreach_mul_(tensors, 2.0)
    more = torch._foreach_add(tensors, 1.0)
    torch._foreach_zero_(tensors[1:])
    return [*tensors, *more]


@case
def swapped_and_swapped_back():
    a = torch.randn(3)
    b = torch.randn(3)
    a, b = b, a
    a.copy_(b)
    b.zero_()
    return [a, b]


@case
def a_clone_before_an_overwrite():
    a = torch.empty(20).normal_()
    before = a.clone()
    a.uniform_()
    a[:3] = before[:3]
    return [a, before]


@case
def a_fill_written_over_the_same_memory_twice():
    a = torch.empty(200).normal_()
    total = a.sum()
    a.normal_()
    return [a, total]


@case
def torch_tensor_of_tensors():
    a = torch.randn(3)
    return [torch.tensor([x.item() for x in a]), torch.as_tensor(a), torch.stack(list(a)), torch.tensor(a.tolist())]


@case
def quantization_free_ranges():
    weight = torch.randn(8, 8)
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return Holder(weight=(weight / scale).round().clamp(-128, 127).to(torch.int8), scale=scale)


@pytest.mark.parametrize("name", CASES)
def test_constructors_match_eager(name):
    assert_same_as_eager(CASES[name], anything=False)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_does_not_matter(threads):
    def build():
        return nn.Sequential(nn.Linear(700, 500), mlp(), nn.Conv2d(3, 8, 3), nn.Embedding(1000, 300).bfloat16())

    assert_same_as_eager(build, ways=({"num_threads": threads},))
