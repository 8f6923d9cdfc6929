"""What a step reads may be replaced by an equal object, and then by another at the same address."""

import warnings

import pytest
import torch

import firstloss as fl
from firstloss.errors import GraphChangeWarning

scale = 1.5


class Thing:
    pass


def places():
    """For each place: how something is stored there, and how it is read."""
    items, table, thing, inner = [None], {}, Thing(), None

    def put_inner(value):
        nonlocal inner
        inner = value

    def put_global(value):
        global scale
        scale = value

    def default(value=None):
        return value

    def keyword(*, value=None):
        return value

    def put_default(value):
        default.__defaults__ = (value,)

    def put_keyword(value):
        keyword.__kwdefaults__["value"] = value

    def put_keywords(value):
        keyword.__kwdefaults__ = {"value": value}

    return {
        "list": (lambda value: items.__setitem__(0, value), lambda: items[0]),
        "slice of a list": (lambda value: items.__setitem__(slice(None), [value]), lambda: items[0]),
        "dict": (lambda value: table.__setitem__("scale", value), lambda: table["scale"]),
        "attribute": (lambda value: setattr(thing, "scale", value), lambda: thing.scale),
        "variable": (put_inner, lambda: inner),
        "global": (put_global, lambda: scale),
        "default": (put_default, lambda: default()),
        "keyword default": (put_keyword, lambda: keyword()),
        "keyword defaults": (put_keywords, lambda: keyword()),
    }


KINDS = {
    "float": lambda text: float(text),
    "int": lambda text: int(float(text)) * 10**6,
    "complex": lambda text: complex(text),
    "str": lambda text: "0" * 40 + text,
    "tuple": lambda text: (float(text), text),
}


def number(value):
    return float(value[0] if isinstance(value, tuple) else value.real if isinstance(value, complex) else value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", places())
def test_an_object_at_the_address_of_an_equal_one_is_detected(place, kind, backend):
    (put, get), make = places()[place], KINDS[kind]
    weight = torch.ones(2)

    @fl.trace
    def step(x):
        return (x * weight).sum() * number(get())

    def check(text):
        assert step(torch.ones(2)).item() == 2 * number(make(text))

    where = []
    put(make("1000.5"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphChangeWarning)
        for _ in range(3):
            check("1000.5")
        for _ in range(8):
            put(make("1000.5"))  # the equal object
            check("1000.5")
            where.append(id(get()))
            for text in ("7.5", "8.5"):  # the second may be allocated at the equal object's address
                put(make(text))
            where.append(id(get()))
            check("8.5")
            put(make("1000.5"))
            check("1000.5")
    assert len(set(where)) > 1  # several objects are stored there
