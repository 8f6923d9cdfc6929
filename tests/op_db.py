"""PyTorch's own samples of its operations (OpInfo), without the search for the test that asks for them.

For each sample PyTorch looks through the whole stack, with the source of each frame, for a `unittest.TestCase`; there
is none here, and it would be most of the time.
"""

import torch

import firstloss as fl

fl.deferred_init(torch.nn.Linear, 1, 1)  # what it replaces in torch.linalg is in place before op_db takes hold of it
from torch.testing._internal import common_utils  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.opinfo import core  # noqa: E402
from torch.testing._internal.opinfo.core import OpInfo, SampleInput  # noqa: E402

for module in (common_utils, core):
    module.extract_test_fn = lambda: None

__all__ = ["OpInfo", "SampleInput", "op_db"]
