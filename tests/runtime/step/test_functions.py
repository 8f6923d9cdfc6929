"""With which of XLA's emitters a step's functions are compiled."""

import pytest
import torch

import firstloss as fl
from firstloss.compat import jax_names
from firstloss.runtime import jax_support
from tests import compiled_steps


def repeated(x):
    for _ in range(20):
        x = torch.tanh(x) * 2
    return x


STEPS = {
    "distinct": (lambda x: torch.tanh(x).exp().sum(), (4, 4), True),
    "repeated": (repeated, (4, 4), False),
    "few places": (lambda x: x.max(1)[1], (8, 8), True),
    "many places": (lambda x: x.max(1)[1], (1024, 1024), False),
    "scattered": (lambda x: x.scatter_add(1, x.long().abs(), x), (1024, 1024), False),
}


@pytest.mark.parametrize("name", STEPS)
def test_older_emitters_suit_functions_that_repeat_little_and_scatter_little(name):
    function, shape, suits = STEPS[name]
    fl.backend("XLA")
    step = fl.trace(lambda x: function(x))
    step(torch.zeros(shape))
    functions = compiled_steps.latest(step).executable._functions.values()
    assert [f.older_emitters for f in functions] == [suits]


def test_older_emitters_are_for_one_cpu_device_unless_the_user_has_chosen(monkeypatch):
    name = jax_support._EMITTERS
    monkeypatch.setenv("XLA_FLAGS", "")
    assert jax_support.compile_options(older_emitters=True)[name] is False
    assert name not in jax_support.compile_options()
    assert name not in jax_support.compile_options(on_mesh=True, older_emitters=True)
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=true")
    assert name not in jax_support.compile_options(older_emitters=True)


@pytest.mark.parametrize("is_known", [True, False])
def test_another_jax_is_asked_whether_it_has_them(is_known, monkeypatch):
    monkeypatch.setattr(jax_names, "TESTED", ())
    if not is_known:
        monkeypatch.setattr(jax_support, "_EMITTERS", "xla_cpu_use_emitters_of_the_future")
    jax_support._has_emitters.cache_clear()
    try:
        assert jax_support._has_emitters() is is_known
    finally:
        jax_support._has_emitters.cache_clear()
