"""Shards on GPUs, one per rank: slices of the weights that one process computes on the CPU, bit for bit."""

import pytest
import torch

from tests.init import dtensor_ranks
from tests.init.distributed import on_ranks

RANKS = "tests.init.dtensor_ranks"
ON = {
    1: ["one_fill_each", "made_by_kernels", "fsdp", "tensor_parallel"],
    2: ["fsdp", "hsdp", "tensor_parallel", "made_by_kernels"],
    4: ["fsdp", "tensor_parallel", "two_dimensions", "in_any_order"],
    8: ["fsdp", "two_dimensions"],
}
pytestmark = pytest.mark.gpu


@pytest.mark.timeout(0)  # `on_ranks` has a time limit of its own
@pytest.mark.parametrize("world", ON)
def test_shards_match_slices_of_one_process(world, tmp_path):
    if torch.cuda.device_count() < world:
        pytest.skip(f"there are not {world} GPUs on this machine")
    calls = [*(f"{RANKS}:{name}" for name in ON[world]), f"{RANKS}:digest:{tmp_path / 'digest'}"]
    on_ranks(world, *calls, seconds=60, device="cuda")
    torch.manual_seed(0)
    assert (tmp_path / "digest").read_text() == dtensor_ranks.digest_of(dtensor_ranks.Model())
