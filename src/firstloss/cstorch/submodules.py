"""The submodules of `cerebras.pytorch`, for imports such as `from firstloss.cstorch.core.device import device`.

Firstloss is divided otherwise: each is another name of the module that has its names.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

_SPARSE = ("SparsityAlgorithm", "DynamicSparsityAlgorithm", "Static", "GMP", "SET", "RigL", "Group", "configure")
_MESH = (
    "Box", "BoxDeviceType", "Mesh", "Placement", "Replicate", "Shard", "ShardingSpec", "all_gather", "all_slice",
    "d2d_transfer", "distribute_tensor", "m2m_transfer", "replicate", "shard", "sharding_spec",
)  # fmt: skip
_EXPERIMENTAL = ("Compression", "get_loop_iteration_slice", "start_implicit_loop", "update_implicit_loop")

# Modules whose names cannot be used here, and what to do instead.
UNSUPPORTED: dict[str, tuple[tuple[str, ...], str]] = {
    "sparse": (
        _SPARSE,
        "it saves time on Cerebras' hardware alone. Leave it out, or mask weights in PyTorch.",
    ),
    "mesh": (_MESH, "it places tensors on a Wafer-Scale Engine. Pass mesh={...} to cstorch.backend."),
    "experimental": (_EXPERIMENTAL, "it is for Cerebras' hardware."),
}

# Modules under their names in `cerebras.pytorch`: the modules here that have their names, the first one first.
_HERE = "firstloss.cstorch"
_DATA = (f"{_HERE}.utils.data",)
_OPTIM = (f"{_HERE}.optim",)
_ACCEPTED = (f"{_HERE}.accepted",)
SUBMODULES: dict[str, tuple[str, ...]] = {
    "backend": (_HERE, f"{_HERE}.accepted", "firstloss.runtime.backend"),
    "backends": _ACCEPTED,
    "backend.base_backend": ("firstloss.runtime.backend",),
    "core": (_HERE,),
    "core.annotation": _ACCEPTED,
    "core.compile": (_HERE,),
    "core.device": (_HERE, "firstloss.runtime.backend"),
    "core.name_scope": _ACCEPTED,
    "core.tensor": (_HERE,),
    "decomp": _ACCEPTED,
    "decomp.registry": _ACCEPTED,
    "distributed.cluster_resolver": (f"{_HERE}.distributed",),
    "distributed.service_resolver": (f"{_HERE}.distributed",),
    "distributed.worker_state": (f"{_HERE}.distributed",),
    "metrics": ("firstloss.metrics",),
    **{
        f"metrics.{name}": ("firstloss.metrics",)
        for name in ("accuracy", "cb_metric", "dice_coefficient", "fbeta_score", "mean_iou", "mean_per_class_accuracy",
                     "metric", "perplexity", "rouge_score", "utils")
    },
    **{
        f"optim.{name}": _OPTIM
        for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "AdamBase", "Adamax", "Lamb", "Lion", "Muon", "NAdam",
                     "RAdam", "RMSprop", "Rprop", "SGD", "optimizer")
    },
    **{
        f"amp.{name}": (f"{_HERE}.amp",)
        for name in ("amp", "autocast", "conditional_update", "grad_scaler", "optimizer_step", "utils")
    },
    "nn.parameter": (f"{_HERE}.nn",),
    "nn.scope": (f"{_HERE}.nn",),
    "nn.selective_updates": (f"{_HERE}.nn",),
    **{
        f"nn.modules.{name}": (f"{_HERE}.nn.modules",)
        for name in ("BCELoss", "BCEWithLogitsLoss", "CTCLoss", "CosineEmbeddingLoss", "CrossEntropyLoss", "DiceCELoss",
                     "DiceLoss", "GaussianNLLLoss", "HingeEmbeddingLoss", "HuberLoss", "KLDivLoss", "L1Loss", "MSELoss",
                     "MarginRankingLoss", "MultiLabelSoftMarginLoss", "MultiMarginLoss", "NLLLoss", "PoissonNLLLoss",
                     "SmoothL1Loss", "TripletMarginLoss", "TripletMarginWithDistanceLoss")
    },
    **{
        f"sparse.{name}": (f"{_HERE}.sparse",)
        for name in ("base", "configure", "dynamic", "gmp", "group", "init", "rigl", "set", "static", "utils")
    },
    **{f"mesh.{name}": (f"{_HERE}.mesh",) for name in ("api", "collectives", "mesh", "placement", "spec")},
    "experimental.compression": (f"{_HERE}.experimental",),
    "profiler.profiler": (f"{_HERE}.profiler",),
    "storage": (_HERE,),
    "storage.load": (_HERE,),
    "storage.save": (_HERE,),
    "utils.call_once": (f"{_HERE}.utils.tools",),
    "utils.constant": _ACCEPTED,
    "utils.data.data_executor": _DATA,
    "utils.data.dataloader": _DATA,
    "utils.data.dataset": _DATA,
    "utils.data.utils": _DATA,
    "utils.device_annotation": _ACCEPTED,
    "utils.pol": _ACCEPTED,
    "utils.profiler": (f"{_HERE}.utils.tracker",),
    "utils.step_closures": (_HERE,),
    "utils.tensor": (_HERE,),
    "utils.tensorboard.writer": (f"{_HERE}.utils.tensorboard",),
    "utils.utils": (f"{_HERE}.utils.tools",),
}  # fmt: skip


class _Submodule(types.ModuleType):
    """A module whose names are those of others."""

    def __init__(self, name: str, sources: tuple[str, ...]) -> None:
        super().__init__(name, f"The names of {', '.join(sources)}.")
        self.__path__: list[str] = []
        self._sources = sources

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for source in self._sources:
                try:
                    return getattr(importlib.import_module(source), name)
                except AttributeError:
                    continue
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}; see docs/cstorch-names.md")


class _UnsupportedSubmodule(types.ModuleType):
    """A module of classes of which none can be constructed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{_HERE}.{name}", f"Not supported: {UNSUPPORTED[name][1]}")
        self.__path__: list[str] = []
        self.__all__ = list(UNSUPPORTED[name][0])

    def __getattr__(self, name: str) -> Any:
        if name not in self.__all__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}; see docs/cstorch-names.md")
        from .accepted import unsupported_class

        module = self.__name__.removeprefix(f"{_HERE}.")
        value = unsupported_class(module, name, UNSUPPORTED[module][1])
        setattr(self, name, value)
        return value


def register() -> None:
    """Make the submodules importable. They are not attributes of packages, which may have functions of these names."""
    for name, sources in SUBMODULES.items():
        sys.modules.setdefault(f"{_HERE}.{name}", _Submodule(f"{_HERE}.{name}", sources))
    for name in UNSUPPORTED:
        sys.modules.setdefault(f"{_HERE}.{name}", _UnsupportedSubmodule(name))
