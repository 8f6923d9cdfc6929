"""Closures that are called with lists and dicts, generated: they see and change them as plain functions would that run
at once in eager PyTorch, or raise an error."""

import collections
import copy
import itertools

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.errors import ClosureError
from tests import scale

PROGRAM = """
def program(closure, trace, batches, model):
    seen, held, box, other = [], {container}, Box(), []
    box.held = held
    @closure
    def log(given, loss):
        seen.append((plain(given), loss.item()))
        {by_closure}
    @trace
    def step({parameters}):
        with torch.no_grad(): loss = model(x).sum()
        {before}
        log({passed}, loss)
        {after}
        return loss
    for i, x in enumerate(batches()):
        {in_loop}
        step({arguments})
        {later}
    return seen, plain(held)
"""

# A container, and how it is changed: `c` is it, `v` a number.
CONTAINERS = {
    "list": ("[]", "{c}.append({v})"),
    "dict": ("{{}}", "{c}[len({c})] = {v}"),
    "ordered": ("collections.OrderedDict(a=1)", "{c}.update(a={v}, b=2)"),
    "defaultdict": ("collections.defaultdict(list)", "{c}['a'].append({v})"),
    "deque": ("collections.deque([0], maxlen=3)", "{c}.append({v})"),
    "nested": ("{{'a': [], 'b': {{}}}}", "{c}['a'].append({v}); {c}['b'][len({c}['b'])] = {v}"),
    "tuple": ("([], {{}})", "{c}[0].append({v}); {c}[1].update(a={v})"),
}
PASSED = ("held", "box.held", "given", "[held, 1]", "{'a': held, 'loss': loss}", "dict(a=held)")
CHANGED = ("nowhere", "before", "after", "in_loop", "later")


class Box:
    pass


def plain(held):
    return copy.deepcopy(held)


def source(container, passed, changed, by_closure):
    made, change = CONTAINERS[container]
    inner = {"[held, 1]": "given[0]", "{'a': held, 'loss': loss}": "given['a']", "dict(a=held)": "given['a']"}
    places = dict.fromkeys(("before", "after", "in_loop", "later"), "pass")
    if changed != "nowhere":
        places[changed] = change.format(c="given" if passed == "given" and changed in ("before", "after") else "held",
                                        v="i" if changed in ("in_loop", "later") else "7")  # fmt: skip
    given = passed == "given"
    return PROGRAM.format(
        container=made.format(),
        passed=passed,
        by_closure=change.format(c=inner.get(passed, "given"), v="loss.item()") if by_closure else "pass",
        parameters="x, given" if given else "x",
        arguments="x, held" if given else "x",
        **places,
    )


CASES = [
    pytest.param(*case, id="-".join([case[0], str(PASSED.index(case[1])), case[2], "changes" if case[3] else "reads"]))
    for case in itertools.product(CONTAINERS, PASSED, CHANGED, (False, True))
]


def batches():
    return [torch.full((2, 4), float(n)) for n in range(5)]


@pytest.mark.parametrize("loops", [False, True], ids=["no loop", "loop"])
@pytest.mark.parametrize("container, passed, changed, by_closure", scale.of(CASES[::3], CASES))
def test_a_closure_sees_and_changes_containers_as_a_function_would(
    container, passed, changed, by_closure, loops, backend
):
    text = source(container, passed, changed, by_closure)
    scope = {"collections": collections, "torch": torch, "Box": Box, "plain": plain}
    exec(text, scope)
    program = scope["program"]
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)  # so that sums are exact
    expected = program(lambda f: f, lambda f: f, batches, model)
    compiled = fl.compile(copy.deepcopy(model), backend)

    def executor():
        return fl.utils.data.DataExecutor(fl.utils.data.DataLoader(batches), num_steps=5) if loops else batches()

    try:
        seen, held = program(fl.step_closure, fl.trace, executor, compiled)
    except ClosureError as error:
        assert by_closure and changed != "nowhere" and "changes a" in str(error)
        return
    assert values((seen, held)) == values(expected)


def values(held):
    """With tensors as numbers."""
    if isinstance(held, torch.Tensor):
        return held.item()
    if isinstance(held, dict):
        return {key: values(value) for key, value in held.items()}
    if isinstance(held, (list, tuple, collections.deque)):
        return [values(value) for value in held]
    return held


class Meter:
    """Data: a step's arguments that are such objects are taken apart."""

    def __init__(self):
        self.total = torch.zeros(())
        self.count = 0


OBJECTS = {
    "existing": ("x", "x", "meter"),
    "argument": ("x, given", "x, meter", "given"),
    "argument in a list": ("x, given", "x, [meter]", "given[0]"),
    "in a list": ("x", "x", "[meter, 1][0]"),
    "in a tuple": ("x", "x", "(meter,)[0]"),
}
OF_OBJECT = """
def program(closure, trace, batches, model, meter):
    seen = []
    @closure
    def log(given, loss):
        seen.append((float(given.total), given.count, loss.item()))
        given.count += 1
    @trace
    def step({parameters}):
        with torch.no_grad(): loss = model(x).sum()
        {passed}.total = {passed}.total + loss
        log({passed}, loss)
        return loss
    for x in batches(): step({arguments})
    return seen, float(meter.total), meter.count
"""
MADE_BY_STEP = """
def program(closure, trace, batches, model, meter):
    seen = []
    @closure
    def log(given, more): seen.append((float(given.total), given.count, more['m'].total.item()))
    @trace
    def step(x):
        with torch.no_grad(): loss = model(x).sum()
        made = Meter()
        made.total = made.total + loss
        log(made, {'m': made})
        return loss
    for x in batches(): step(x)
    return seen
"""


@pytest.mark.parametrize("way", [*OBJECTS, "made by the step"])
def test_a_closure_gets_an_object_itself(way, backend):
    if way in OBJECTS:
        parameters, arguments, passed = OBJECTS[way]
        text = OF_OBJECT.format(parameters=parameters, arguments=arguments, passed=passed)
    else:
        text = MADE_BY_STEP
    scope = {"torch": torch, "Meter": Meter}
    exec(text, scope)
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    expected = scope["program"](lambda f: f, lambda f: f, batches, model, Meter())
    compiled = fl.compile(copy.deepcopy(model), backend)
    assert scope["program"](fl.step_closure, fl.trace, batches, compiled, Meter()) == expected


# A list that the closure appends to, and on which what the step computes depends, too.
READING = {
    "in another argument": "log(held, loss * (1 + len(held)))",
    "beside the call": "loss = loss * (1 + len(held)); log(held, loss)",
    "in a function that returns it": "log(longer(held, factors), loss * (1 + sum(factors)))",
    "to choose it": "log(held if len(held) < 3 else other, loss * (1 + len(other)))",
    "an item": "log(held, loss * (held[-1] if held else 1))",
    "unpacked": "log(*[held], loss * (1 + len(held)))",
    "by another name": "h = held; log(h, loss * (1 + len(h)))",
    "an attribute": "log(box.held, loss * (1 + len(box.held)))",
    "in a list that it is passed in": "log([held][0], loss * (1 + len([held][0])))",
    "in a dict that is also read": "d = {'h': held}; log(d['h'], loss * (1 + len(d['h'])))",
    "by keyword": "log(loss=loss * (1 + len(held)), given=held)",
}
READER = """
def program(closure, trace, batches, model):
    held, other, box, factors = [], [], Box(), []
    box.held = held
    def longer(given, into):
        into[:] = [len(given)]
        return given
    @closure
    def log(given, loss): given.append(loss.item())
    @trace
    def step(x):
        with torch.no_grad(): loss = model(x).sum()
        {calls}
        return loss
    return [step(x).item() for x in batches()], held, other
"""


@pytest.mark.parametrize("way", READING)
def test_a_step_may_read_what_it_passes_to_a_closure(way, backend):
    scope = {"torch": torch, "Box": Box}
    exec(READER.format(calls=READING[way]), scope)
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    expected = scope["program"](lambda f: f, lambda f: f, batches, model)
    compiled = fl.compile(copy.deepcopy(model), backend)
    assert scope["program"](fl.step_closure, fl.trace, batches, compiled) == expected


def test_a_list_that_is_passed_before_the_step_changes_it_and_after_is_guarded(backend):
    """By one line, for whose first call another list is made, of what it held in the trace."""

    def program(closure, trace):
        seen, shown = [], [0]
        log = closure(lambda given: seen.append(list(given)))

        @trace
        def step(x):
            for k in range(2):
                log(shown)
                if k == 0:
                    shown.append(k)
            return x.sum()

        for x in batches():
            step(x)
            shown.append(5)
        return seen

    assert program(fl.step_closure, fl.trace) == program(lambda f: f, lambda f: f)
