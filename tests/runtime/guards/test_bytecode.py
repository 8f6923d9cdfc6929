"""Which call a loaded value is an argument of, as the bytecode of this Python says."""

import pytest

from firstloss.runtime.guards import bytecode

PASSED = [
    "log(held)",
    "log(held, f(x))",
    "log(held, o.m(x, k=f(1)), g(h(1)))",
    "log(f(1), held, k=2)",
    "log(x, h=held)",
    "log({'a': held}, x)",
    "log([held, f(x)], f(y))",
    "log((1, held), f()(x))",
]
READ = [
    "log(f(held), x)",
    "log(f(x, held), 1)",
    "log(held[0])",
    "log(held + x)",
    "log(-held, 1)",
    "log(held == x)",
    "log(x, *held)",
    "log(held if c else d)",
    "log(held.items(), x)",
]


def is_passed_to_the_last_call(text, local):
    """`local`: whether the functions are local variables, which Python calls by other instructions."""
    code = compile(text, "text", "eval")
    if local:
        names = sorted(set(code.co_names) - {"held", "items", "m"})
        scope = {}
        exec(f"def outer({', '.join(names)}):\n return {text}", scope)
        code = scope["outer"].__code__
    steps = bytecode.instructions(code)
    load = next(step for step in steps if step.name in ("LOAD_NAME", "LOAD_GLOBAL") and step.argument == "held")
    return bytecode.call_with(bytecode.Load(code, load.offset)) == max(s.offset for s in steps if "CALL" in s.name)


@pytest.mark.parametrize("local", [False, True], ids=["global", "local"])
@pytest.mark.parametrize("text, expected", [*((text, True) for text in PASSED), *((text, False) for text in READ)])
def test_arguments_of_a_call(text, expected, local):
    assert is_passed_to_the_last_call(text, local) is expected
