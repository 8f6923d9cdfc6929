"""Valid and invalid TARGETs, and their errors."""

import json
import sys

import pytest

from firstloss.cli import target
from firstloss.errors import TargetError

MODULE = """\
import torch

class Outer:
    Inner = torch.nn.Linear

answer = 42

def broken(width):
    layer = torch.nn.Linear(width, 1)
    raise ValueError("no such thing")

def deep(width):
    return torch.nn.Linear(width, 1).load_state_dict({})
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A user's module in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "user_models.py").write_text(MODULE)
    yield "user_models"
    sys.modules.pop("user_models", None)


def fails(text, *arguments, call=False):
    """The message of the single error that `text` raises."""
    with pytest.raises(TargetError) as caught:
        constructor = target.load(text, arguments)
        if call:
            constructor()
    return str(caught.value)


def test_a_callable_gets_its_arguments():
    result = target.load("torch.nn:Linear", ["in_features=3", "out_features=4", "bias=False"])()
    assert result.weight.shape == (4, 3) and result.bias is None


def test_a_value_that_is_not_a_literal_is_a_string():
    assert target.load("builtins:dict", ["a=relu", "b=(1, 2)", "c=None"]).arguments == {
        "a": "relu",
        "b": (1, 2),
        "c": None,
    }


def test_a_module_in_the_current_folder_and_a_nested_name_are_found(user_module):
    assert target.load("user_models:Outer.Inner", ["in_features=3", "out_features=4"])().out_features == 4


@pytest.mark.parametrize("text", ["torch", "torch.nn", ":Linear", "torch.nn:", ""])
def test_a_target_without_a_callable_is_an_error(text):
    assert "write package.module:callable" in fails(text)


def test_a_missing_module_is_an_error():
    message = fails("torchh.nn:Linear")
    assert "no module 'torchh'" in message and "check the spelling" in message


def test_a_missing_import_in_the_module_is_an_error(user_module, tmp_path):
    (tmp_path / "user_models.py").write_text("x = 1\nimport surely_not_installed\n")
    message = fails("user_models:f")
    assert "imports 'surely_not_installed', which is not installed" in message and "user_models.py:2" in message


def test_a_module_that_raises_is_an_error(user_module, tmp_path):
    (tmp_path / "user_models.py").write_text("x = 1\n\ny = 1 / 0\n")
    message = fails("user_models:f")
    assert "ZeroDivisionError" in message and "user_models.py:3" in message


def test_a_syntax_error_names_its_line(user_module, tmp_path):
    (tmp_path / "user_models.py").write_text("x = 1\ny = = 2\n")
    assert "user_models.py:2" in fails("user_models:f")


def test_a_misspelled_name_gets_a_suggestion():
    assert "torch.nn has no 'Linaer': did you mean 'Linear'?" in fails("torch.nn:Linaer")


def test_a_target_that_is_not_callable_is_an_error(user_module):
    assert "is of type int, which is not callable" in fails("user_models:answer")


def test_arguments_are_checked_before_the_call():
    message = fails("torch.nn:Linear", "in_features=3")
    assert "missing a required argument: 'out_features'" in message and "--arg NAME=VALUE" in message
    assert "'bais'" in fails("torch.nn:Linear", "in_features=3", "out_features=4", "bais=0")


@pytest.mark.parametrize("argument", ["width", "=3", "a b=3", "3=3"])
def test_an_argument_can_be_none(argument):
    assert "is not NAME=VALUE" in fails("torch.nn:Linear", argument)


def test_a_constructor_that_raises_is_named_with_the_users_line(user_module, tmp_path):
    message = fails("user_models:broken", "width=3", call=True)
    assert "ValueError: no such thing" in message and f"{tmp_path}/user_models.py:10" in message


def test_an_error_inside_torch_is_named_with_the_users_line(user_module, tmp_path):
    assert f"{tmp_path}/user_models.py:13" in fails("user_models:deep", "width=3", call=True)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


@pytest.fixture
def config(tmp_path):
    """Write a config.json and return its path."""
    pytest.importorskip("transformers")

    def write(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({k: v for k, v in {**LLAMA, **changes}.items() if v is not None}))
        return str(path)

    return write


def test_a_config_makes_its_architecture(config, tmp_path):
    result = target.load(config())()
    assert type(result).__name__ == "LlamaForCausalLM" and result.lm_head.weight.shape == (64, 32)
    assert type(target.load(str(tmp_path))()).__name__ == "LlamaForCausalLM"


def test_a_config_without_architecture_makes_the_base_model(config):
    assert type(target.load(config(architectures=None))()).__name__ == "LlamaModel"


def test_a_config_makes_weights_in_its_dtype(config):
    assert str(target.load(config(dtype="bfloat16"))().lm_head.weight.dtype) == "torch.bfloat16"


def test_fields_of_a_config_can_be_overridden(config):
    assert target.load(config(), ["vocab_size=16"])().lm_head.weight.shape == (16, 32)


def test_invalid_configs_are_errors(config, tmp_path):
    assert "cannot be read: No such file" in fails(str(tmp_path / "nope.json"))
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in fails(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text("[]")
    assert 'no "model_type"' in fails(str(tmp_path / "config.json"))
    assert 'no "model_type"' in fails(config(model_type=None))
    assert "did you mean 'llama'?" in fails(config(model_type="lama"))
    assert "no class 'LlamaForEverything'" in fails(config(architectures=["LlamaForEverything"]))
    assert "no field 'hidden_sise'" in fails(config(), "hidden_sise=3")
