"""What every test needs: torchvision importable beside a CPU build of torch, and the fixtures of the runtime."""

import os
import sys

import pytest
import torch


def define_torchvision_operations() -> None:
    """Declare the compiled operations whose fakes torchvision registers on import.

    The registry's torchvision is built for CUDA; its library of compiled operations does not load beside torch's CPU
    build, and the import (transformers does it, where torchvision is installed) fails for want of their schemas. No
    constructor and no training step here calls one of them.
    """
    try:
        torch.ops.torchvision.nms  # noqa: B018
    except AttributeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_library"] = library  # the declarations last as long as this object


define_torchvision_operations()
sys.path.append(os.path.join(sys.prefix, "zoo"))  # where `make test` puts torchvision and timm


@pytest.fixture
def backend(tmp_path):
    """An XLA backend with an artifact folder of its own."""
    import firstloss as fl

    return fl.backend("XLA", artifact_dir=tmp_path)


@pytest.fixture
def traced(monkeypatch):
    """A list with one item for each trace: how often a step's Python has run, whatever it counts itself."""
    from firstloss.runtime.step import tracing

    found = []
    trace = tracing.trace_step

    def counted(*args):
        found.append(1)
        return trace(*args)

    monkeypatch.setattr(tracing, "trace_step", counted)
    return found
