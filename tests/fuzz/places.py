"""Places where a step may keep state from call to call: how each is created, read and written."""

# ruff: noqa: E501 - a line of a generated program is one line here
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .program_builder import Draft


@dataclass(frozen=True)
class Place:
    """An expression that reads the kept object, and a statement that replaces it.

    Attributes:
        get: the expression.
        put: the statement for a given expression.
        name: the variable, where the place is one.
    """

    get: str
    put: Callable[[str], str]
    name: str = ""

    @property
    def assignable(self) -> bool:
        """Whether `get` may be the target of an assignment."""
        return self.put("0") == f"{self.get} = 0"


def place(d: Draft, init: str, number: bool = False) -> Place:
    """Add a place to the draft, with `init` as its first content.

    Args:
        number: a number is kept there, and no tensor.
    """
    makers = [*_ANY, *(_NUMBERS if number else _TENSORS)]
    return d.rng.choice(makers)(d, init)


def assigned(get: str) -> Place:
    return Place(get, lambda e: f"{get} = {e}")


def variable(d: Draft, init: str) -> Place:
    if d.form == "module":
        return module_variable(d, init)
    name = d.name("h")
    d.setup.append(f"{name} = {init}")
    d.free.append(name)
    return Place(name, lambda e: f"{name} = {e}", name)


def module_variable(d: Draft, init: str) -> Place:
    name = d.name("G")
    d.top.append(f"{name} = None")
    d.setup.append(f"{name} = {init}")
    d.module.append(name)
    return Place(name, lambda e: f"{name} = {e}", name)


def _of_module_dict(d: Draft, init: str) -> Place:
    name = d.name("G")
    d.top.append(f"{name} = None")
    d.setup.append(f"globals()['{name}'] = {init}")
    d.names.remove(name)
    key = d.pick(f"'{name}'", f"'{name[0]}' + '{name[1:]}'")
    return assigned(f"globals()[{key}]")


def _namespace(d: Draft, init: str) -> Place:
    s = d.name("s")
    d.setup.append(f"{s} = types.SimpleNamespace(h={init})")
    return assigned(f"{s}.h")


def _nested_namespace(d: Draft, init: str) -> Place:
    s = d.name("s")
    d.setup.append(f"{s} = types.SimpleNamespace(inner=types.SimpleNamespace(h={init}), k=[0])")
    return assigned(f"{s}.inner.h")


def _vars(d: Draft, init: str) -> Place:
    s = d.name("s")
    d.setup.append(f"{s} = types.SimpleNamespace(h={init})")
    return assigned(f"{d.pick(f'vars({s})', f'{s}.__dict__')}['h']")


def _getattr(d: Draft, init: str) -> Place:
    s = d.name("s")
    d.setup.append(f"{s} = types.SimpleNamespace(h0={init})")
    read = d.pick(f"getattr({s}, 'h%d' % 0)", f"operator.attrgetter('h0')({s})", f"getattr({s}, 'h0', 0)")
    return Place(read, lambda e: f"setattr({s}, 'h' + str(0), {e})")


def _object(d: Draft, init: str) -> Place:
    s = d.name("box")
    body = d.pick(
        "class {C}:\n    def __init__(self, h):\n        self.h = h",
        "class {C}:\n    __slots__ = ('h',)\n\n    def __init__(self, h):\n        self.h = h",
        "@dataclasses.dataclass\nclass {C}:\n    h: object",
        "@dataclasses.dataclass(slots=True)\nclass {C}:\n    h: object = None",
        "class {C}:\n    def __init__(self, h):\n        self._h = h\n\n    @property\n    def h(self):\n        return self._h\n\n"
        "    @h.setter\n    def h(self, h):\n        self._h = h",
        "class {C}:\n    def __init__(self, h):\n        self.__dict__['held'] = {{'h': h}}\n\n    def __getattr__(self, k):\n"
        "        try:\n            return self.__dict__['held'][k]\n        except KeyError:\n            raise AttributeError(k)\n\n"
        "    def __setattr__(self, k, v):\n        self.held[k] = v",
        "class Kept{n}:\n    def __get__(self, o, t=None):\n        return self if o is None else o.__dict__['_h']\n\n"
        "    def __set__(self, o, v):\n        o.__dict__['_h'] = v\n\n\n"
        "class {C}:\n    h = Kept{n}()\n\n    def __init__(self, h):\n        self.h = h",
    )
    cls = s.capitalize()
    d.top.append(body.format(C=cls, n=s[3:]))
    d.setup.append(f"{s} = {cls}({init})")
    return assigned(f"{s}.h")


def _weakly(d: Draft, init: str) -> Place:
    s, w = d.name("box"), d.name("ref")
    cls = s.capitalize()
    d.top.append(f"class {cls}:\n    pass")
    d.setup.append(f"{s} = {cls}()\n{s}.h = {init}\n{w} = weakref.ref({s})")
    return assigned(f"{w}().h")


def _class_attribute(d: Draft, init: str) -> Place:
    s = d.name("box")
    cls = s.capitalize()
    d.top.append(f"class {cls}:\n    h = None")
    d.setup.append(f"{cls}.h = {init}\n{s} = {cls}()")
    return Place(f"{d.pick(s, cls)}.h", lambda e: f"{cls}.h = {e}")


def _inherited(d: Draft, init: str) -> Place:
    """The first write creates an instance attribute, which hides the class's."""
    s = d.name("box")
    cls = s.capitalize()
    d.top.append(f"class {cls}:\n    h = None")
    d.setup.append(f"{cls}.h = {init}\n{s} = {cls}()")
    return assigned(f"{s}.h")


def _function_attribute(d: Draft, init: str) -> Place:
    f = d.name("f")
    d.top.append(f"def {f}():\n    pass")
    d.setup.append(f"{f}.h = {init}")
    return assigned(f"{f}.h")


def _model_attribute(d: Draft, init: str) -> Place:
    name = d.name("h")
    d.setup.append(f"m.{name} = {init}")
    d.names.remove(name)
    owner = d.pick("$m", "$m.z", "$m.act")
    d.setup[-1] = f"{owner.replace('$', '')}.{name} = {init}"
    return assigned(f"{owner}.{name}")


def _item(d: Draft, init: str) -> Place:
    s = d.name("d")
    first, get = d.pick(
        (f"{{'h': {init}}}", f"{s}['h']"),
        (f"{{'a': {{'b': [{init}]}}}}", f"{s}['a']['b'][0]"),
        (f"[{init}]", f"{s}[0]"),
        (f"[0, {{'h': {init}}}]", f"{s}[-1]['h']"),
        (f"collections.OrderedDict(k=1, h={init})", f"{s}['h']"),
        (f"collections.defaultdict(lambda: {init})", f"{s}['h']"),
        (f"collections.ChainMap({{}}, {{'h': {init}}})", f"{s}['h']"),
        (f"collections.deque([{init}])", f"{s}[0]"),
        (f"collections.UserDict(h={init})", f"{s}['h']"),
        (f"collections.UserList([{init}])", f"{s}[0]"),
        (f"{{0: [{init}, 0]}}", f"{s}[0][0]"),
        (f"({init}, [{init}])", f"{s}[1][0]"),
        (f"dict([((1, 2), {init})])", f"{s}[1, 2]"),
    )
    d.setup.append(f"{s} = {first}")
    return assigned(get)


def _own_items(d: Draft, init: str) -> Place:
    s = d.name("box")
    cls = s.capitalize()
    d.top.append(
        f"class {cls}:\n    def __init__(self):\n        self.items = {{}}\n\n"
        "    def __getitem__(self, k):\n        return self.items[k]\n\n"
        "    def __setitem__(self, k, v):\n        self.items[k] = v"
    )
    d.setup.append(f"{s} = {cls}()\n{s}['h'] = {init}")
    return assigned(f"{s}['h']")


def _ring(d: Draft, init: str) -> Place:
    s = d.name("q")
    d.setup.append(f"{s} = collections.deque([{init}], maxlen={d.rng.randint(1, 3)})")
    return Place(f"{s}[-1]", lambda e: f"{s}.append({e})")


def _growing(d: Draft, init: str) -> Place:
    s = d.name("hist")
    d.setup.append(f"{s} = [{init}]")
    return Place(f"{s}[-1]", lambda e: f"{s}.append({e})")


def _replaced_tuple(d: Draft, init: str) -> Place:
    outer = variable(d, f"({init}, 0)")
    return Place(f"{outer.get}[0]", lambda e: outer.put(f"({e}, {outer.get}[0])"))


def _named_tuple(d: Draft, init: str) -> Place:
    cls = d.name("Pair")
    d.top.append(f"{cls} = collections.namedtuple('{cls}', 'h k')")
    d.names.remove(cls)
    outer = variable(d, f"{cls}({init}, 1)")
    return Place(f"{outer.get}.h", lambda e: outer.put(f"{outer.get}._replace(h={e})"))


def _rebuilt_dict(d: Draft, init: str) -> Place:
    outer = variable(d, f"{{'h': {init}, 'k': 1}}")
    return Place(f"{outer.get}['h']", lambda e: outer.put(f"{{**{outer.get}, 'h': {e}}}"))


def _context(d: Draft, init: str) -> Place:
    s = d.name("ctx")
    d.setup.append(f"{s} = contextvars.ContextVar('{s}')\n{s}.set({init})")
    return Place(f"{s}.get()", lambda e: f"{s}.set({e})")


def _default_argument(d: Draft, init: str) -> Place:
    f = d.name("keep")
    d.setup.append(
        f"def {f}(new=None, box=[{init}]):\n    if new is not None:\n        box[0] = new\n    return box[0]"
    )
    return Place(f"{f}()", lambda e: f"{f}({e})")


def _cells(d: Draft, init: str) -> Place:
    get, put, make = d.name("get"), d.name("put"), d.name("make")
    d.top.append(
        f"def {make}(h):\n    def get():\n        return h\n\n    def put(v):\n        nonlocal h\n        h = v\n\n    return get, put"
    )
    d.setup.append(f"{get}, {put} = {make}({init})")
    return Place(f"{get}()", lambda e: f"{put}({e})")


def _partial(d: Draft, init: str) -> Place:
    f = d.name("part")
    d.setup.append(f"{f} = functools.partial(lambda h: h, h={init})")
    return Place(f"{f}()", lambda e: f"{f}.keywords['h'] = {e}")


def _thread_local(d: Draft, init: str) -> Place:
    s = d.name("local")
    d.setup.append(f"{s} = threading.local()\n{s}.h = {init}")
    return assigned(f"{s}.h")


def _module_object(d: Draft, init: str) -> Place:
    s = d.name("cfg")
    d.setup.append(f"{s} = types.ModuleType('cfg')\n{s}.h = {init}")
    return assigned(f"{s}.h")


def _self(d: Draft, init: str) -> Place:
    if d.form != "method":
        return _namespace(d, init)
    name = d.name("h")
    d.names.remove(name)
    d.fields.append(f"self.{name} = {init}")
    return assigned(f"self.{name}")


def _method(d: Draft, init: str) -> Place:
    s = d.name("box")
    cls = s.capitalize()
    d.top.append(
        f"class {cls}:\n    def __init__(self, h):\n        self.h = h\n\n    def __call__(self, *new):\n"
        "        if new:\n            (self.h,) = new\n        return self.h"
    )
    d.setup.append(f"{s} = {cls}({init})")
    return Place(f"{s}()", lambda e: f"{s}({e})")


def _held_by_proxy(d: Draft, init: str) -> Place:
    s, p = d.name("d"), d.name("view")
    d.setup.append(f"{s} = {{'h': {init}}}\n{p} = types.MappingProxyType({s})")
    return Place(f"{p}['h']", lambda e: f"{s}['h'] = {e}")


def _buffer(d: Draft, init: str) -> Place:
    if "State" in init:  # an object that holds a tensor
        return _namespace(d, init)
    name = d.name("h")
    d.names.remove(name)
    d.setup.append(f"m.register_buffer('{name}', {init}, persistent={d.chance(0.5)})")
    return assigned(f"$m.{name}")


def _array(d: Draft, init: str) -> Place:
    s = d.name("arr")
    d.setup.append(f"{s} = {d.pick(f'array.array(chr(100), [{init}, 0])', f'np.array([{init}, 0.0])')}")
    return assigned(f"{s}[0]")


def _environment(d: Draft, init: str) -> Place:
    key = f"FIRSTLOSS_FUZZ_{d.rng.randint(0, 9)}"
    d.setup.append(f"os.environ['{key}'] = str({init})")
    return Place(f"float(os.environ['{key}'])", lambda e: f"os.environ['{key}'] = str({e})")


def _enumeration(d: Draft, init: str) -> Place:
    cls = d.name("Phase")
    d.names.remove(cls)
    d.top.append(f"class {cls}(enum.IntEnum):\n" + "\n".join(f"    P{i} = {i}" for i in range(12)))
    outer = variable(d, f"{cls}(int({init}))")
    return Place(f"{outer.get}.value", lambda e: outer.put(f"{cls}(int({e}) % 12)"))


_ANY = [
    variable,
    variable,
    variable,
    module_variable,
    module_variable,
    _of_module_dict,
    _namespace,
    _nested_namespace,
    _vars,
    _getattr,
    _object,
    _object,
    _object,
    _weakly,
    _class_attribute,
    _inherited,
    _function_attribute,
    _model_attribute,
    _model_attribute,
    _item,
    _item,
    _item,
    _item,
    _own_items,
    _ring,
    _growing,
    _replaced_tuple,
    _named_tuple,
    _rebuilt_dict,
    _context,
    _default_argument,
    _cells,
    _partial,
    _thread_local,
    _module_object,
    _self,
    _self,
    _self,
    _method,
    _held_by_proxy,
]
_TENSORS = [_buffer, _buffer]
_NUMBERS = [_array, _environment, _enumeration]
