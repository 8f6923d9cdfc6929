"""Which f-strings are only printed or logged, by the bytecode of the code that makes them."""

import logging
import sys
import types

import pytest

from firstloss.capture import printed_texts

# Code that formats `n` or `m`, and for each time, in order, whether the text is only printed or logged.
CASES = [
    ("print(f'{n}', file=out)", [1]),
    ("print(f'a {n:.3f} b {m}', file=out)", [1, 1]),
    ("print('x', f'{n}', 3, end=f'{m}', file=out)", [1, 1]),
    ("print(f'{n}' + 'x', file=out)", [0]),
    ("print(len(f'{n}'), file=out)", [0]),
    ("print(f'{f\"{n}\":>5}', file=out)", [0]),
    ("print((f'{n}', 1), file=out)", [0]),
    ("print([f'{n}'], file=out)", [0]),
    ("log.info(f'{n} %s', f'{m}')", [1, 1]),
    ("H.log.info(f'{n}')", [1]),
    ("H.log.log(20, f'{n}')", [0]),
    ("str(f'{n}')", [0]),
    ("print(f'{n:{w}.1f}', file=out)", [1]),
    ("print(f'{w:{n}}', file=out)", [0]),
    ("print(a.b, f'{n}', a.b * 2, d['k'], -w, file=out)", [1]),
    ("print(f'{n}' if w else f'{m}', file=out)", [0]),
    ("print(f'{n}', 1 if w else 2, file=out)", [0]),
    ("print(*[f'{n}'], file=out)", [0]),
    ("print(f'{n!r}', file=out)", []),
    ("print(str.upper(f'{n}'), f'{m}', file=out)", [0, 1]),
    ("pr(f'{n}')", [0]),
    ("print(file=out)or print(f'{n}', file=out)", [1]),
    ("print(f'{w} {n} {w:>3} {m:.1f} {a.b}', sep=f'{n}', file=out)", [1, 1, 1]),
    ("print(\n  f'{n}'\n  f' {m}',\n  file=out)", [1, 1]),
    ("print(f'{n}', fast(w, w), file=out)", [1]),
    ("fast(f'{n}', print(w, w, w, file=out))", [0]),
    ("fast(f'{n}', print(w, w, w, w))if 0 else fast(f'{n}', fast(print(w,w,file=out),3,4,5))", [0]),
    ("print(w)if 0 else 0\nprint(f'{n}', *[], file=out)", [0]),
    ("pr.__call__(f'{n}')", [0]),
    ("getattr(H.log,'info')(f'{n}')", [0]),
    ("x=print\nx(f'{n}', file=out)", [1]),
    ("[print(f'{n}', file=out) for _ in 'a']", [1]),
    ("(lambda: print(f'{n}', file=out))()", [1]),
    ("print(print(f'{n}', file=out), file=out)", [1]),
    ("print('{}'.format(n), file=out)", [1]),
    ("print('a {:.3f} b {x}'.format(n, x=m), w, file=out)", [1, 1]),
    ("print('{0:.1f} {0}'.format(n), file=out)", [1, 1]),
    ("print(f'{\"{}\".format(n)} {m}', file=out)", [0, 1]),
    ("print('{:{}}'.format(w, n), file=out)", [0]),
    ("print('{}'.format(n).upper(), file=out)", [0]),
    ("t = '{}'; print(t.format(n), file=out)", [0]),
    ("pr('{}'.format(n))", [0]),
    ("print('{} {}'.format(f'{n}', w), file=out)", [1]),
    ("print(format(n, '.3f'), file=out)", [0]),
    ("log.warning('{}'.format(n))", [1]),
    ("print('{}'.format(fast(n, '{}'.format(m))), file=out)", [0]),
]
# The same of code in a function, whose variables nothing else can read.
LOCALS = [
    ("t = f'{n}'", [1]),
    ("t = f'{n}'; print(t, file=out)", [1]),
    ("t = f'{n}'; print(t, file=out); log.info(t)", [1]),
    ("t = f'{n}'; print(t, file=out); pr(t)", [0]),
    ("t = f'{n}'; print(len(t), file=out)", [0]),
    ("t = f'{n}'; print(f'a {t}', t, file=out)", [0]),
    ("t = f'{n}'; u = '{} {}'.format(t, m); print(u, file=out)", [1, 1]),
    ("t = f'{n}'; print('{:>9}'.format(t), file=out)", [0]),
    ("t = f'{n}'; print('{!r}'.format(t), file=out)", [0]),
    ("t = f'{n}'; print('{[0]}'.format(t), file=out)", [0]),
    ("t = f'{n}'; print(t[0], file=out)", [0]),
    ("t = f'{n}'; print(t, t, w, t, file=out)", [1]),
    ("t = f'{n}'; pr(w, t)", [0]),
    ("t = f'{n}'; pr(t, w)", [0]),
    ("t = '{}'.format(n)\nif w:\n  print(t, file=out)\nelse:\n  log.info('%s', t)", [1]),
    ("t = f'{n}'; t = pr(t)", [0]),
    ("t = f'{n}'; print(t, file=out); locals()", [0]),
    ("t = f'{n}'; print(t, file=out); return t", [0]),
    ("t = f'{n}'; print((lambda: t)(), file=out)", [0]),
    ("t = f'{n}'; t += 'a'; print(t, file=out)", [0]),
    ("def g():\n  t = f'{n}'\n  yield\n  print(t, file=out)\nlist(g())", [0]),
    ("t = u = f'{n}'; print(t, u, file=out)", [0]),
    ("for _ in 'ab':\n  t = f'{n}'\n  print(t, file=out)", [1, 1]),
    ("t = ''\nfor _ in 'ab':\n  print(t, file=out)\n  t = f'{n}'", [1, 1]),
]


class Number:
    def __init__(self, answers):
        self.answers = answers

    def __format__(self, spec):
        self.answers.append(int(printed_texts.is_for_print(sys._getframe(1))))
        return "1"

    def __str__(self):
        return "1"


@pytest.mark.parametrize(
    ("where", "code", "expected"),
    [(where, *case) for where in ("a module", "a function") for case in CASES]
    + [("a function", *case) for case in LOCALS]
    + [("a module", "t = f'{n}'", [0])],
)
def test_only_what_is_printed_or_logged_at_once_is(code, expected, where, monkeypatch, tmp_path):
    monkeypatch.setattr(printed_texts, "is_replacement", lambda name, function: function is print)
    log = logging.getLogger("made_up_for_texts")
    log.propagate = False
    answers = []
    with open(tmp_path / "out", "w") as out:
        names = {
            "n": Number(answers), "m": Number(answers), "w": 5, "out": out, "log": log, "logging": logging,
            "H": types.SimpleNamespace(log=log), "a": types.SimpleNamespace(b=2), "d": {"k": 1},
            "pr": lambda *args: 0, "fast": lambda *args: 0,
        }  # fmt: skip
        if where == "a function":
            lines = "\n".join(f"    {line}" for line in code.split("\n"))
            code = f"def f(n, m, w, a, log, d):\n{lines}\nf(n, m, w, a, log, d)"
        exec(compile(code, "<code>", "exec"), names)
    assert answers == expected


def test_a_function_of_the_users_own_is_not_print(capsys):
    answers = []
    names = {"n": Number(answers), "print": lambda *args: 0}
    exec("print(f'{n}')", names)
    assert answers == [0]


def test_a_text_is_taken_apart_at_its_marks():
    text = f"a {printed_texts.mark(0)}{printed_texts.mark(12)} b"
    assert printed_texts.pieces(text) == ["a ", 0, "", 12, " b"]
    assert printed_texts.pieces("a") == printed_texts.pieces(3) == []
