"""torchvision and timm where `make test` installs them, importable with any build of torch."""

from __future__ import annotations

import importlib.util
import os
import sys

import torch

_declared: list[torch.library.Library] = []  # the declarations last as long as these objects


def find_zoo() -> None:
    """Make torchvision and timm importable.

    The registry's torchvision is built for CUDA: its compiled library does not load with a CPU build of torch, and
    importing torchvision (as transformers does if it is installed) fails without the schemas of the operations whose
    fake implementations it registers. They are declared here; no model here calls one of them. Where the library loads,
    it declares them itself, and aborts the process if it finds them declared.
    """
    sys.path.append(os.path.join(sys.prefix, "zoo"))
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _declared:
        return
    try:
        torch.ops.load_library(os.path.join(os.path.dirname(spec.origin), "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
