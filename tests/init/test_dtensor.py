import pytest
import torch

import firstloss as fl
from firstloss.engine import cpu_engine
from firstloss.engine.plan import RangePlanner
from tests.init import dtensor_docs, dtensor_ranks
from tests.init.distributed import on_ranks

RANKS = "tests.init.dtensor_ranks"
ORDER = "tests.init.dtensor_order"
DOCS = "tests.init.dtensor_docs"
RESHARDING = "tests.init.resharding_ranks"
ON_ANY = ["one_fill_each", "fsdp", "hsdp", "tensor_parallel", "placements", "initialisers_after_sharding"]
ON = {
    1: [],
    2: [*ON_ANY, "fsdp_policies", "real_tensors_still_travel", "collectives_are_refused", "nothing_whole", "llama"],
    4: [*ON_ANY, "two_dimensions", "in_any_order", "init_after_sharding", "changes_after_sharding", "counter"],
}


@pytest.mark.timeout(0)  # `on_ranks` has a time limit of its own
@pytest.mark.parametrize("world", ON)
def test_shards_match_slices_of_one_process(world, tmp_path):
    """The processes start once for all cases of `dtensor_ranks.py`: importing torch takes most of the time."""
    calls = [f"{RANKS}:{name}" for name in ON[world]]
    calls += [f"{RANKS}:digest:{tmp_path / 'digest'}", f"{DOCS}:both_ways:{tmp_path / 'both'}"]
    if world == 2:
        calls.append(f"{RANKS}:checkpoint:{tmp_path / 'checkpoint'}")
    on_ranks(world, *calls)
    torch.manual_seed(0)
    assert (tmp_path / "digest").read_text() == dtensor_ranks.digest_of(dtensor_ranks.Model())
    dtensor_docs.check_row(world, tmp_path / "both")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("order", ["imported_late", "imported_before", "distributed_before"])
def test_what_is_drawn_does_not_depend_on_what_was_done_before(order):
    """Processes of their own, since Firstloss's handling of DTensors stays."""
    on_ranks(2, f"{ORDER}:{order}", fresh=True)


@pytest.mark.timeout(0)
def test_a_run_goes_on_over_another_number_of_ranks(tmp_path):
    """Each rank reads its rows of distributed checkpoints, of safetensors with an index and of torch.save's files."""
    on_ranks(4, f"{RESHARDING}:begin:{tmp_path}")
    on_ranks(2, f"{RESHARDING}:go_on:{tmp_path}")
    on_ranks(8, f"{RESHARDING}:go_on:{tmp_path}")


def test_a_process_that_fails_is_named():
    with pytest.raises(AssertionError, match="rank 0 of 1 ended with status 1\n(.|\n)*no_such_function"):
        on_ranks(1, f"{RANKS}:no_such_function")


def fill(*shape):
    return torch.empty(shape).normal_()


def values(make):
    torch.manual_seed(0)
    tensors = fl.deferred_init(make)
    return [tensor._storage.value for tensor in tensors], tensors


def by_range(values):
    planned = cpu_engine.by_range(values, RangePlanner())
    return [value for value in values if value in planned]


def test_independent_shards_are_made_range_by_range(monkeypatch):
    monkeypatch.setattr(cpu_engine, "_SMALL_BYTES", 0)

    def make():
        edited = fill(10, 20)
        edited[3].zero_()
        part = fill(30, 20)[5:10].clone()
        converted = fill(40, 20)[:, :3].clone().to(torch.float64)
        arithmetic = fill(10, 10) * 2
        return edited, part, converted, arithmetic

    (edited, part, converted, arithmetic), kept = values(make)
    assert by_range([edited, part, converted, arithmetic]) == [edited, part, converted, arithmetic]
    del kept


def test_values_are_not_computed_twice(monkeypatch):
    monkeypatch.setattr(cpu_engine, "_SMALL_BYTES", 0)

    def make():
        whole = fill(30, 20)
        thirds = [chunk.clone() for chunk in fill(30, 20).chunk(3)]
        return whole, whole[:10].clone(), *thirds

    nodes, kept = values(make)
    assert by_range(nodes) == nodes[:1]
    assert by_range(nodes[1:4]) == nodes[1:4]
    del kept


def test_shared_values_are_computed_once():
    def make():
        small, tied = fill(30, 20), fill(300, 200)
        seen = fill(300, 200)
        doubled = seen * 2
        seen.add_(1)
        return small[:10].clone(), small[10:20].clone(), tied, tied.clone(), tied.clone(), seen, doubled

    nodes, kept = values(make)
    assert by_range(nodes) == [nodes[2]]
    del kept


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_can_be_made_without_ranks(threads, monkeypatch):
    monkeypatch.setattr(cpu_engine, "_TASK_SIZE", 1000)
    monkeypatch.setattr(cpu_engine, "_MIN_TASK_SIZE", 1000)

    def make():
        big = fill(300, 200)
        return torch.nn.ParameterList([big[100:250].clone(), big[:, 30:60].clone(), fill(100, 300)[7].clone()])

    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    deferred = fl.deferred_init(make)
    reports = []
    fl.materialize_module(deferred, num_threads=threads, progress=lambda *at: reports.append(at))
    for a, b in zip(deferred, eager, strict=True):
        assert torch.equal(a, b)
    assert reports[-1][0] == reports[-1][1] == sum(p.nbytes for p in eager)
