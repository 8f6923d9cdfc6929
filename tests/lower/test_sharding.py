"""Propagation of shardings from operands to results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from firstloss.capture.recorder import new_index
from firstloss.lower.program import call_of, forget_functions
from firstloss.lower.rules import RULES
from firstloss.lower.sharding import _cut, rule_of_call
from firstloss.lower.sharding_rules import rule_of
from firstloss.program.graph import Node, Ref, Value
from firstloss.program.source import UNKNOWN


def take(table, indices):
    return jnp.take(table, indices, axis=0)


def conv(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME")


# A function, the shapes of its operands (letters name their dimensions), and the operand dimension that each dimension
# of the result comes from: "." for none.
CASES = {
    "elementwise": (lambda x, y: jnp.exp(x) * y, ["a4 b8", "c4 d8"], "a=c b=d"),
    "by a number": (lambda x: x * 2.0 + 1, ["a4 b8"], "a b"),
    "broadcast": (lambda x, y: x + y, ["a4 b8", "c8"], "a b=c"),
    "broadcast of one": (lambda x, y: x + y, ["a4 b8", "c4 d1"], "a=c b"),
    "matmul": (lambda x, w: x @ w.T, ["a4 b6 c8", "d16 e8"], "a b d"),
    "matmul, of weights' gradient": (lambda g, x: jnp.einsum("bto,bti->oi", g, x), ["a4 b6 c8", "d4 e6 f5"], "c f"),
    "batched matmul": (lambda q, k: q @ k.swapaxes(-1, -2), ["a4 b2 c6 d8", "e4 f2 g7 h8"], "a=e b=f c g"),
    "transpose": (lambda x: x.transpose(2, 0, 1), ["a4 b6 c8"], "c a b"),
    "merged": (lambda x: x.reshape(24, 8), ["a4 b6 c8"], "a c"),
    "split": (lambda x: x.reshape(4, 6, 2, 4), ["a4 b6 c8"], "a b c ."),
    "split and merged": (lambda x: x.reshape(8, 3, 8), ["a4 b6 c8"], "a . c"),
    "ones put in": (lambda x: x[:, None, :, None], ["a4 b8"], "a . b ."),
    "ones taken out": (lambda x: x.squeeze(1), ["a4 b1 c8"], "a c"),
    "sum": (lambda x: x.sum(1), ["a4 b6 c8"], "a c"),
    "sum, kept": (lambda x: x.max(-1, keepdims=True), ["a4 b6"], "a ."),
    "argmax": (lambda x: x.argmax(0), ["a4 b6"], "b"),
    "softmax": (lambda x: jax.nn.softmax(x), ["a4 b6"], "a b"),
    "a part": (lambda x: x[:, 2:4], ["a4 b6"], "a b"),
    "joined": (lambda x, y: jnp.concatenate([x, y], 1), ["a4 b6", "c4 d2"], "a=c b=d"),
    "padded": (lambda x: jnp.pad(x, ((0, 0), (1, 1))), ["a4 b6"], "a b"),
    "cumulated": (lambda x: x.cumsum(1), ["a4 b6"], "a b"),
    "sorted": (lambda x: jnp.sort(x, 1), ["a4 b6"], "a b"),
    "convolution": (conv, ["a4 b3 c8 d8", "e16 f3 g3 h3"], "a e . ."),
    "in a function": (lambda x, w: jax.jit(lambda a: jnp.tanh(a) @ w)(x), ["a4 b8", "c8 d6"], "a d"),
    "numbers of its own": (lambda x: x.sum() + jnp.arange(8.0), ["a4"], "."),
}
INDEXED = {
    "rows": (take, ["a32 b8", "i4 j6"], "i j b"),
    "along": (lambda x, i: jnp.take_along_axis(x, i[..., None], -1)[..., 0], ["a4 b8", "i4"], "a=i"),
    "rows' gradient": (lambda t, i, g: t.at[i].add(g), ["a32 b8", "i4 j6", "c4 d6 e8"], "a b=e"),
}


def shape_of(words):
    return tuple(int(word[1:]) for word in words.split())


def propagated(function, operands):
    arrays = [
        jax.ShapeDtypeStruct(shape_of(words), jnp.int32 if words.startswith("i") else jnp.float32) for words in operands
    ]
    rule = rule_of(jax.make_jaxpr(function)(*arrays).jaxpr)
    names = {}
    for words, dims in zip(operands, rule.operands, strict=True):
        for word, number in zip(words.split(), dims, strict=True):
            names.setdefault(number, []).append(word[0])
    (result,) = rule.results
    return " ".join("=".join(names.get(number, ".")) for number in result)


@pytest.mark.parametrize("name", {**CASES, **INDEXED})
def test_a_results_dimensions_come_from_its_operands(name):
    function, operands, expected = {**CASES, **INDEXED}[name]
    assert propagated(function, operands) == expected


def test_a_barrier_keeps_shardings():
    """A barrier's operands may have the same shape without being related."""
    arrays = [jax.ShapeDtypeStruct((4, 8), jnp.float32)] * 3
    rule = rule_of(jax.make_jaxpr(lambda *xs: lax.optimization_barrier(xs))(*arrays).jaxpr)
    assert rule.results == rule.operands
    assert len({number for dims in rule.operands for number in dims}) == 6


AXES = {"fsdp": 4, "tp": 2}
CUTS = [
    # spec, dimension, over what, shape, expected
    (((), ()), 0, ("fsdp",), (8, 8), (("fsdp",), ())),
    (((), ()), 0, ("fsdp",), (6, 8), ((), ())),  # does not divide
    (((), ()), 1, ("fsdp", "tp"), (8, 4), ((), ("fsdp",))),  # as far as it does
    ((("fsdp",), ()), 1, ("fsdp", "tp"), (8, 8), (("fsdp",), ("tp",))),  # an axis shards one dimension only
    ((("fsdp",), ()), 0, ("tp",), (8, 8), (("fsdp",), ())),  # the first one stays
    (((),), 0, ("tp",), (0,), ((),)),
]


@pytest.mark.parametrize("spec, dim, over, shape, expected", CUTS)
def test_a_dimension_is_split_only_evenly(spec, dim, over, shape, expected):
    assert _cut(spec, dim, over, shape, AXES) == expected


@pytest.fixture
def traced(monkeypatch):
    """How often the rule of aten.neg has been traced."""
    times = []

    def neg(x):
        times.append(x)
        return -x

    monkeypatch.setitem(RULES, torch.ops.aten.neg.default, neg)
    forget_functions()
    yield times
    forget_functions()


def test_what_has_been_traced_for_its_sharding_rule_is_not_when_it_is_lowered(traced):
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    value = Value((7, 13), (13, 1), torch.float32, torch.device("cpu"))
    node = Node(new_index(), torch.ops.aten.neg.default, (Ref.of(value),), {}, (), False, None, UNKNOWN)
    node.outputs = (Value((7, 13), (13, 1), torch.float32, torch.device("cpu"), node),)
    call = call_of(node)
    rule = rule_of_call(call, NamedSharding(mesh, PartitionSpec()))
    assert rule.operands == rule.results and len(rule.operands) == 1
    argument = jax.ShapeDtypeStruct((7, 13), np.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    with jax.enable_x64(True):
        jax.jit(lambda x: call.run([x], None)).lower(argument)
    assert len(traced) == 1
