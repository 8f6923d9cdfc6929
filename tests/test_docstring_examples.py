"""The examples in docstrings run separately, after the imports listed in `docs/reference/index.md`."""

import doctest
import inspect

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.runtime import backend as backends
from tests.test_docstrings import PUBLIC

# The first things that a reader looks up.
CORE = (
    "deferred", "deferred_init", "is_deferred", "materialize_module", "materialize_tensor", "init_program",
    "save_initialized", "shard", "mark_sharding", "run_stablehlo", "backend", "compile", "save", "load",
    "utils.data.DataLoader", "utils.data.DataExecutor", "distributed.initialize", "amp.autocast",
    "register_lowering", "trainer.Trainer", "trace", "Pad", "step_closure", "checkpoint_closure",
)  # fmt: skip

EXAMPLES = {
    name: doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", {}, name, None, 0)
    for name, (thing, _) in PUBLIC.items()
    if ">>>" in (inspect.getdoc(thing) or "")
}


def test_core_names_have_an_example():
    assert not [name for name in CORE if f"fl.{name}" not in EXAMPLES]


def run(test, space):
    """The failures of a docstring's examples."""
    output = []
    test.globs = {"fl": fl, "torch": torch, "nn": nn, **space}
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=output.append)
    return "".join(output)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backends, "_current", None)
    half = fl.amp.get_half_dtype()
    test = EXAMPLES[name]
    assert any(example.want for example in test.examples), "it shows nothing"
    try:
        wrong = run(test, {})
    finally:
        fl.amp.set_half_dtype(half)
    assert not wrong, wrong


@pytest.mark.parametrize("text", [">>> 1 + 1\n3", ">>> fl.no_such_name", ">>> fl.is_deferred(torch.ones(1))\nTrue"])
def test_a_wrong_example_is_reported(text):
    test = doctest.DocTestParser().get_doctest(text + "\n", {}, "wrong", None, 0)
    assert run(test, {})
