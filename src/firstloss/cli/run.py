"""`firstloss run SCRIPT`: a training script as it is, in which the models that transformers loads are deferred."""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from ..errors import NotMaterializedWarning, TargetError

NAME = "run"
HELP = "run a training script as it is: models that transformers loads are deferred, so that each rank reads its shards"
EXAMPLE = "torchrun --nproc-per-node 8 -m firstloss run train.py --learning-rate 1e-5"

# The variable by which accelerate has rank 0 load a model and send it to the others.
_SENT_BY_RANK_0 = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the script, or with -m the module")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the script in this process; its exceptions are shown with their traceback, and its exit status is kept."""
    if not args.is_module and not os.path.isfile(args.script):
        raise TargetError(f"{args.script} is not a file; to run a module: firstloss run -m {args.script}")
    warnings.filterwarnings("ignore", category=NotMaterializedWarning)  # it asks for a line that is not to be written
    for name, action in {_TRANSFORMERS: _defer_loading, _ACCELERATE: _load_on_each_rank}.items():
        if name in sys.modules:
            action(sys.modules[name])
        else:
            sys.meta_path.insert(0, _AfterImport(name, action))
    sys.argv = [args.script, *args.arguments]
    try:
        if args.is_module:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(args.script))
            runpy.run_path(args.script, run_name="__main__")
    except Exception as error:
        error.__traceback__ = _of_script(error)
        traceback.print_exception(error)
        return 1
    return 0


def _of_script(error: Exception) -> Any:
    """The traceback without the frames of this file and of runpy."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames or error.__traceback__


class _AfterImport(MetaPathFinder):
    """Calls a function with the module of this name, as soon as it has been imported."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_TRANSFORMERS = "transformers.modeling_utils"
_ACCELERATE = "accelerate.utils.dataclasses"


def _defer_loading(module: Any) -> None:
    """Defer what `from_pretrained` and `AutoModel.from_config` return."""
    for name in ("from_pretrained", "_from_config"):
        original = vars(module.PreTrainedModel)[name].__func__
        setattr(module.PreTrainedModel, name, classmethod(_deferred(original)))


def _deferred(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not _can_be_deferred(kwargs):
            return original(cls, *args, **kwargs)
        import firstloss as fl

        with fl.deferred():
            return original(cls, *args, **kwargs)

    return load


_fsdp: dict[str, int] = {}  # the version of the plugin that the script has made last


def _can_be_deferred(kwargs: dict[str, Any]) -> bool:
    """Whether a model can be read later. It is not if it is quantized while it is loaded, if it is on the meta device,
    and if ZeRO-3 partitions it, or FSDP's first version flattens it: then each rank would read all of it."""
    import torch
    from transformers.integrations import is_deepspeed_zero3_enabled

    if kwargs.get("quantization_config") is not None or torch.get_default_device().type == "meta":
        return False
    by_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    version = _fsdp.get("version") or int(os.environ.get("FSDP_VERSION", 1))
    return not is_deepspeed_zero3_enabled() and (not by_fsdp or version == 2)


def _load_on_each_rank(module: Any) -> None:
    """Leave off `cpu_ram_efficient_loading` in FSDP2, by which rank 0 would load the model for all."""
    plugin = module.FullyShardedDataParallelPlugin
    original = plugin.__post_init__

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        _fsdp["version"] = self.fsdp_version
        if self.fsdp_version == 2 and self.cpu_ram_efficient_loading:
            self.cpu_ram_efficient_loading = False
            os.environ[_SENT_BY_RANK_0] = "False"

    plugin.__post_init__ = post_init
