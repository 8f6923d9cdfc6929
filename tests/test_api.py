"""The public names that users' code relies on keep their arguments."""

import ast
import builtins
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import firstloss as fl
from firstloss import errors, trainer

# Name -> its documented arguments, in order; `*` precedes the keyword-only ones.
SIGNATURES = {
    "deferred_init": "fn *args **kwargs",
    "deferred": "rng=None",  # the enclosing block's policy, otherwise "eager"
    "is_deferred": "module_or_tensor",
    "materialize_tensor": "tensor",
    "materialize_module": "module buffers_only=False check_fn=None * device=None dtype=None num_threads=None "
    "progress=None",
    "save_initialized": "module directory * max_shard_size='5GB' progress=None",
    "init_program": "module",
    "shard": "module specs mesh",
    "mark_sharding": "tensor mesh spec",
    "backend": "name=None * mesh=None artifact_dir='./artifacts'",
    "current_backend": "",
    "current_torch_device": "",
    "use_cs": "",
    "compile": "model backend=None",
    "trace": "step=None",
    "step_closure": "closure",
    "checkpoint_closure": "closure",
    "current_executor": "",
    "save": "obj path",
    "load": "path",
    "utils.data.DataLoader": "input_fn *args **kwargs",
    "utils.data.DataExecutor": "loader=None num_steps=None checkpoint_steps=None activation_steps=None",
    "distributed.ClusterConfig": "num_csx=1 num_workers_per_csx=None",
    "amp.set_half_dtype": "dtype",
    "amp.autocast": "",
    "amp.GradScaler": "loss_scale=None",
    "amp.optimizer_step": "loss optimizer",
}
PROGRAM = {"report": "", "to_stablehlo": "mesh=None shardings=None", "run": "mesh=None shardings=None"}
TRAINER = {
    "Trainer": "device=None backend=None model_dir model optimizer=None schedulers=None precision=None loop=None "
    "checkpoint=None logging=None callbacks=None loggers=None seed=None",
    "Trainer.fit": "self train_dataloader val_dataloader=None ckpt_path",
    "Trainer.validate": "self val_dataloader ckpt_path",
}
OPTIMIZERS = "AdamW Adam SGD Lion Adafactor Lamb RMSprop Adagrad Adamax NAdam RAdam Rprop ASGD Adadelta Muon".split()
SCHEDULES = (
    "Constant Linear Polynomial Exponential InverseExponentialTimeDecay InverseSquareRootDecay CosineDecay "
    "CosineAnnealing CosineAnnealingWarmRestarts Step MultiStep PiecewiseConstant Sequential Chained Lambda "
    "Multiplicative Cyclic OneCycle"
).split()


def lookup(name, where=fl):
    for part in name.split("."):
        where = getattr(where, part)
    return where


def check(function, documented):
    """Whether a call as documented is valid: names, order, kinds and defaults; more parameters are allowed."""
    have = inspect.signature(function).parameters
    by_name_only, place = False, 0
    for argument in documented.split():
        name, _, default = argument.lstrip("*").partition("=")
        if argument == "*":
            by_name_only = True
            continue
        assert name in have, argument
        kind = have[name].kind
        if argument.startswith("*"):
            assert kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD), argument
        elif not by_name_only and not name.endswith("_path"):
            assert kind is not inspect.Parameter.KEYWORD_ONLY or function is trainer.Trainer, argument
            assert function is trainer.Trainer or list(have)[place] == name, argument
        if default:
            assert repr(have[name].default) == default, argument
        place += 1


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_names_keep_their_arguments(name):
    check(lookup(name), SIGNATURES[name])
    assert lookup(name).__doc__


def test_programs_and_the_trainer_keep_their_names():
    import torch

    program = fl.init_program(fl.deferred_init(torch.nn.Linear, 2, 2))
    assert set(program.recipes) == {"weight", "bias"}
    for name, documented in PROGRAM.items():
        check(getattr(program, name), documented)
    for name, documented in TRAINER.items():
        check(lookup(name, trainer), documented)
    for name in ("TrainingLoop", "ValidationLoop", "Checkpoint", "Logging", "Precision", "Callback"):
        assert getattr(trainer, name).__doc__
    from firstloss.trainer import loggers

    assert loggers.ProgressLogger.__doc__ and loggers.TensorBoardLogger.__doc__


def test_optimizers_and_schedules_are_available():
    for name in OPTIMIZERS:
        cls = getattr(fl.optim, name)
        assert issubclass(cls, fl.optim.Optimizer) and callable(cls.preinitialize) and cls.__doc__, name
    for name in SCHEDULES:
        cls = getattr(fl.optim.lr_scheduler, name + "LR")
        assert issubclass(cls, fl.optim.lr_scheduler.Schedule) and cls.__doc__, name


def test_errors_are_subclasses_of_builtins():
    classes = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, BaseException)]
    for error in classes:
        assert error.__doc__
        if error is errors.FirstlossError:
            continue
        built_in = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert issubclass(error, (errors.FirstlossError, Warning)), error
        assert any(base not in (Exception, BaseException, builtins.object) for base in built_in), error


COMMANDS = ("demo", "inspect", "init", "verify", "stablehlo", "fit", "validate")


def test_every_commands_help_has_an_example():
    code = (
        "import sys, io, contextlib\n"
        "from firstloss.cli import main\n"
        f"for command in {COMMANDS!r}:\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out):\n"
        "        try:\n"
        "            code = main([command, '--help'])\n"
        "        except SystemExit as end:\n"
        "            code = end.code\n"
        "    assert not code and '--json' in out.getvalue() and f'firstloss {command}' in out.getvalue(), command\n"
        "assert 'jax' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["firstloss", "firstloss.cstorch"])
def test_type_checkers_see_the_names_that_are_imported_on_first_use(package):
    """Without the stub, what `__getattr__` returns is `Any`, misspelt names included."""
    module = importlib.import_module(package)
    nodes = ast.parse(Path(module.__file__).with_name("__init__.pyi").read_text()).body
    typed = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module != "typing":
            where = "." * node.level + (node.module or "")
            typed |= {alias.name: where for alias in node.names}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            typed[node.target.id] = ""
    typed.pop("__version__", None)
    assert typed.keys() == set(module.__all__)
    if package == "firstloss":
        assert {name: f".{name}" if where == "." else where for name, where in typed.items()} == fl._MODULES
        assert all(names == fl.__all__ for names in map(ast.literal_eval, _assigned(nodes, "__all__")))
    else:
        assert {name for name, where in typed.items() if where.startswith(".")} <= {*module._MODULES, *module._NAMES}


def _assigned(nodes, name):
    values = [node.value for node in nodes if isinstance(node, ast.Assign) and node.targets[0].id == name]
    assert len(values) == 1
    return values
