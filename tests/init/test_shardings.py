"""Specs: which are valid for a weight and a mesh, which are not, and where each shard begins."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import firstloss as fl
from firstloss.errors import NothingDeferredError, ShardingError
from firstloss.init import shardings

AXES = {"data": 2, "fsdp": 3, "tp": 4}

sizes = st.lists(st.integers(1, 48), min_size=1, max_size=4).map(tuple)
axes = st.dictionaries(st.sampled_from(["data", "fsdp", "tp", "pp"]), st.integers(1, 8), min_size=1)


@st.composite
def specs(draw):
    """A shape, a mesh, and a spec with some of its axes."""
    shape, mesh = draw(sizes), draw(axes)
    entries: list[list[str]] = [[] for _ in shape]
    for axis in draw(st.permutations(list(mesh))):
        if draw(st.booleans()):
            entries[draw(st.integers(0, len(shape) - 1))].append(axis)
    return shape, mesh, tuple(tuple(entry) for entry in entries)


@given(specs())
def test_splits_are_even_and_use_no_axis_twice(case):
    shape, mesh, spec = case
    placed = shardings.divided(shape, shardings.checked("w", shape, spec, mesh), mesh)
    used = [axis for entry in placed.spec for axis in entry]
    assert len(used) == len(set(used)) and set(used) <= {axis for entry in spec for axis in entry}
    local = shardings.local_shape(shape, placed.spec, mesh)
    assert all(n == part * math.prod(mesh[a] for a in e) for n, part, e in zip(shape, local, placed.spec, strict=True))
    assert bool(placed.moved) == (placed.spec != spec)


@given(specs())
def test_shards_cover_the_weight_exactly_once(case):
    shape, mesh, spec = case
    spec = shardings.divided(shape, spec, mesh).spec
    local = shardings.local_shape(shape, spec, mesh)
    covered = torch.zeros(shape, dtype=torch.int64)
    names = list(mesh)
    for number in range(math.prod(mesh.values())):
        where = {}
        for axis in reversed(names):
            number, where[axis] = divmod(number, mesh[axis])
        begin = shardings.starts(shape, spec, mesh, where)
        covered[tuple(slice(b, b + n) for b, n in zip(begin, local, strict=True))] += 1
    copies = math.prod(mesh[a] for a in names if not any(a in entry for entry in spec))
    assert (covered == copies).all()


@given(sizes, axes)
def test_the_default_splits_one_dimension_as_finely_as_possible(shape, mesh):
    data = [a for a in mesh if a in shardings.DATA_AXES] or list(mesh)
    spec = shardings.by_default(shape, mesh)
    cut = [d for d, entry in enumerate(spec) if entry]
    assert len(cut) <= 1 and all(axis in data for entry in spec for axis in entry)
    parts = math.prod(mesh[a] for a in spec[cut[0]]) if cut else 1
    subsets = [[a for i, a in enumerate(data) if chosen >> i & 1] for chosen in range(1 << len(data))]
    best = max(math.prod(mesh[a] for a in s) for s in subsets for n in shape if n % math.prod(mesh[a] for a in s) == 0)
    assert parts == best
    if cut:
        assert not any(n > shape[cut[0]] and n % parts == 0 for n in shape)


def test_the_default_is_fsdps():
    assert shardings.by_default((5632, 2048), {"fsdp": 8}) == (("fsdp",), ())
    assert shardings.by_default((2048, 5632), {"fsdp": 8}) == ((), ("fsdp",))
    assert shardings.by_default((64, 64), {"data": 2, "fsdp": 4, "tp": 4}) == (("data", "fsdp"), ())
    assert shardings.by_default((50257, 768), {"fsdp": 8}) == ((), ("fsdp",))
    assert shardings.by_default((7,), {"fsdp": 8}) == ((),)
    assert shardings.by_default((), {"fsdp": 8}) == ()


def model():
    return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6))


@pytest.mark.parametrize(
    "spec, complaint",
    [
        (("nope", None), r"0\.weight: the spec \('nope', None\) names an axis 'nope'\. The mesh has 'data', 'fsdp'"),
        (("tp", None, None), r"has 3 dimensions, but the weight, of shape \[12, 8\], has 2\. Remove the last 1"),
        (("tp", "tp"), "names 'tp' twice"),
        ((0, None), "contains 0"),
        ("tp", "is not a tuple"),
    ],
)
def test_a_bad_spec_names_the_weight_the_spec_and_the_line(spec, complaint):
    module = fl.deferred_init(model)
    with pytest.raises(ShardingError, match=complaint) as raised:
        fl.shard(module, {"1.weight": ("tp",), "0.weight": spec}, AXES)
    assert __file__ in str(raised.value)
    assert shardings.mark_of(module[1].weight) is None  # no partial change
    with pytest.raises(ShardingError) as raised:
        fl.init_program(module).plan(AXES, {"0.weight": spec})
    assert "0.weight" in str(raised.value) and __file__ in str(raised.value)


def test_a_pattern_that_matches_nothing_is_an_error():
    module = fl.deferred_init(model)
    with pytest.raises(ShardingError, match=r"'\*\.q_proj\.weight' matches no weight.*0\.weight"):
        fl.shard(module, {"*.weight": ("tp",), "*.q_proj.weight": ("tp",)}, AXES)
    assert shardings.mark_of(module[0].weight) is None


@pytest.mark.parametrize("specs", [[("0.weight", ("tp",))], "tp", {0: ("tp",)}])
def test_shardings_are_a_mapping_of_patterns(specs):
    module = fl.deferred_init(model)
    for say in (lambda: fl.shard(module, specs, AXES), lambda: fl.init_program(module).plan(AXES, specs)):
        with pytest.raises(ShardingError, match=r"test_shardings\.py:\d+: the shardings .* are not a mapping"):
            say()


@pytest.mark.parametrize(
    "mesh", [{"tp": "4"}, {"tp": "x"}, {"tp": 2.5}, {"tp": None}, {"tp": True}, {"tp": 0}, {3: 4}, {'a"b': 2}, "tp=4"]
)
def test_an_axis_is_a_name_and_a_whole_number(mesh):
    with pytest.raises(ShardingError, match=r"test_shardings\.py:\d+: .* is not a mesh"):
        fl.init_program(fl.deferred_init(model)).plan(mesh)


def test_non_modules_and_non_tensors_are_refused():
    with pytest.raises(ShardingError, match="3 is not a Module"):
        fl.shard(3, {"*": ()}, AXES)
    with pytest.raises(ShardingError, match="'x' is not a tensor"):
        fl.mark_sharding("x", AXES, ("tp",))
    with pytest.raises(NothingDeferredError, match="3 is not a Module"):
        fl.init_program(3)


def test_a_partition_spec_is_a_spec():
    from jax.sharding import PartitionSpec

    placed = fl.init_program(fl.deferred_init(model)).plan(
        {"data": 2, "tp": 2}, {"0.weight": PartitionSpec(("data", "tp"), None)}
    )
    assert placed.weights[0].sharding.spec == (("data", "tp"), ())
    with pytest.raises(ShardingError, match="contains UNCONSTRAINED"):
        fl.init_program(fl.deferred_init(model)).plan(AXES, {"0.weight": PartitionSpec(PartitionSpec.UNCONSTRAINED)})


def test_marks_are_for_one_mesh():
    module = fl.shard(fl.deferred_init(model), {"0.weight": ("tp",)}, {"tp": 4})
    fl.shard(module, {"1.weight": ("tp",)}, {"tp": 2})
    with pytest.raises(ShardingError, match=r"1\.weight: the spec \('tp',\) is for a mesh of {'tp': 2}.*0\.weight"):
        fl.init_program(module).plan()
    assert fl.init_program(module).plan({"tp": 2}).devices == 2


def test_a_mark_without_a_mesh_is_for_the_one_that_is_passed_later():
    module = fl.shard(fl.deferred_init(model), {"0.weight": ("tp",)})
    fl.mark_sharding(module[1].weight, None, (None, "tp"))
    for size in (2, 4):
        specs = {w.name: w.sharding.spec for w in fl.init_program(module).plan({"tp": size}).weights}
        assert specs == {"0.weight": (("tp",), ()), "0.bias": ((),), "1.weight": ((), ("tp",)), "1.bias": ((),)}
    for mesh, complaint in (
        (None, r"test_shardings\.py:\d+: 0\.weight: the spec \('tp',\) was given without a mesh"),
        (
            {"fsdp": 2},
            r"test_shardings\.py:\d+: 0\.weight: .* names an axis 'tp'\. The mesh has 'fsdp'",
        ),
    ):
        with pytest.raises(ShardingError, match=complaint):
            fl.init_program(module).plan(mesh)
    with pytest.raises(ShardingError, match="names 'tp' twice"):
        fl.shard(module, {"0.weight": ("tp", "tp")})
    fl.mark_sharding(module[1].bias, {"tp": 2}, ("tp",))  # that of the others, too
    assert fl.init_program(module).plan().axes == {"tp": 2}


def test_a_mesh_is_given_by_its_axes():
    with pytest.raises(ShardingError, match="8 is not a mesh"):
        fl.shard(fl.deferred_init(model), {"*": ()}, 8)
    assert shardings.axes_of({"a": 2}) == {"a": 2}


def test_the_first_pattern_wins_and_marks_survive_materialization():
    module = fl.shard(fl.deferred_init(model), {"0.*": ("tp",), "*": ()}, AXES)
    assert fl.mark_sharding(module[1].bias, AXES, ("fsdp",)) is module[1].bias
    specs = {w.name: w.sharding.spec for w in fl.init_program(module).plan().weights}
    assert specs == {"0.weight": (("tp",), ()), "0.bias": (("tp",),), "1.weight": ((), ()), "1.bias": (("fsdp",),)}
    fl.materialize_module(module)
    mark = shardings.mark_of(module[0].weight)
    assert mark is not None and mark.spec == ("tp",)


def test_a_tied_weight_may_be_named_by_any_of_its_names():
    def tied():
        module = nn.ModuleDict({"embedding": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)})
        module["head"].weight = module["embedding"].weight
        return module

    program = fl.init_program(fl.deferred_init(tied))
    plan = program.plan(AXES, {"head.weight": ("tp", None)})
    assert [(w.name, w.sharding.spec) for w in plan.weights] == [("embedding.weight", (("tp",), ()))]
    assert plan.aliases == {"head.weight": "embedding.weight"}
    for bad in ("nope", None), ("tp", None, None):
        with pytest.raises(ShardingError, match=r"head\.weight: the spec"):  # although the first name's spec is valid
            program.plan(AXES, {"embedding.weight": ("tp",), "head.weight": bad})


def test_an_axis_that_does_not_divide_moves_with_a_warning():
    program = fl.init_program(fl.deferred_init(nn.Linear, 64, 51, bias=False))
    with pytest.warns(UserWarning, match=r"weight: axis 'tp' of size 4 does not divide dimension 0 of 51.*dimension 1"):
        plan = program.plan(AXES, {"weight": ("tp",)})
    assert plan.weights[0].local == (51, 16)
    assert plan.to_dict()["moved"]


def test_the_first_pattern_wins_with_or_without_a_wildcard():
    names = dict.fromkeys(("a.weight", "a.bias", "b.weight", "c[0]", "c0"))
    first = {"a.weight": (1,), "*.weight": (2,), "a.*": (3,), "c[0]": (4,)}
    expected = {"a.weight": (1,), "a.bias": (3,), "b.weight": (2,), "c0": (4,)}
    assert shardings.match(names, first, shardings.UNKNOWN) == expected
    later = {"*.weight": (2,), "a.weight": (1,)}
    assert shardings.match(names, later, shardings.UNKNOWN) == {"a.weight": (2,), "b.weight": (2,)}
    for pattern in ("c", "a.weigh", "d[0]"):
        with pytest.raises(ShardingError, match="matches no weight"):
            shardings.match(names, {pattern: ()}, shardings.UNKNOWN)
    with pytest.raises(ShardingError, match="matches no weight"):
        shardings.match({"c[0]": None}, {"c[0]": ()}, shardings.UNKNOWN)  # c0 is the dimension it matches
