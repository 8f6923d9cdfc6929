"""PyTorch's own samples of its operations (OpInfo), without the search for the test that requests them.

For each sample PyTorch searches the whole stack, with the source of each frame, for a `unittest.TestCase`; there is
none here, and the search would dominate.
"""

import torch

import firstloss as fl

fl.deferred_init(torch.nn.Linear, 1, 1)  # torch.linalg names that this replaces must be set before op_db imports them
from torch.testing._internal import common_utils  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.opinfo import core  # noqa: E402
from torch.testing._internal.opinfo.core import OpInfo, SampleInput  # noqa: E402

for module in (common_utils, core):
    module.extract_test_fn = lambda: None

__all__ = ["OpInfo", "SampleInput", "op_db"]
