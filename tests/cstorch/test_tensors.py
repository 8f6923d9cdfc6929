"""Filled tensors and NumPy arrays by Cerebras' names."""

import pytest
import torch

import firstloss as fl
import firstloss.cstorch as cstorch


@pytest.mark.parametrize("name", ["CSX", "CPU"])
def test_factories_match_torch(name, tmp_path):
    fl.backend(name, artifact_dir=tmp_path)
    like = torch.ones(2, 3, dtype=torch.float64)
    pairs = {
        "full": (cstorch.full((2, 3), 4.0), torch.full((2, 3), 4.0)),
        "ones": (cstorch.ones((2, 3)), torch.ones(2, 3)),
        "zeros": (cstorch.zeros((2, 3), dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)),
        "full_like": (cstorch.full_like(like, 4), torch.full_like(like, 4)),
        "ones_like": (cstorch.ones_like(like, dtype=torch.float32), torch.ones(2, 3)),
        "zeros_like": (cstorch.zeros_like(like), torch.zeros_like(like)),
    }
    for traced, eager in pairs.values():
        assert traced.dtype == eager.dtype and torch.equal(traced.clone(), eager)
    total = cstorch.zeros(())
    step = fl.trace(lambda x: total.add_(x.sum()))
    for _ in range(3):
        step(torch.ones(2))
    assert float(total) == 6


def test_numpy_arrays_round_trip():
    import ml_dtypes
    import numpy as np

    for dtype in (np.float32, np.int64, np.bool_, ml_dtypes.bfloat16):
        array = np.arange(6).reshape(2, 3).astype(dtype)
        tensor = cstorch.from_numpy(array)
        assert cstorch.from_numpy(tensor) is tensor and cstorch.to_numpy(array) is array
        assert np.array_equal(cstorch.to_numpy(tensor), array) and cstorch.to_numpy(tensor).dtype == array.dtype
        tensor[0, 0] = 1
        assert array[0, 0] == 1  # shared memory
        fixed = array[::-1]
        fixed.flags.writeable = False
        assert np.array_equal(cstorch.to_numpy(cstorch.from_numpy(fixed)), fixed)
