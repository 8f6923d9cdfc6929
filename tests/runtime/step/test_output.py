"""What a traced step prints and logs: at each call what eager PyTorch prints, once, whether it is compiled or not."""

import builtins
import contextlib
import io
import logging
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import firstloss as fl
from tests import scale
from tests.compiled_steps import compilations

pytestmark = [
    pytest.mark.filterwarnings("ignore::firstloss.errors.EagerStepWarning"),
    pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning"),
]
LOG = logging.getLogger("made_up_for_output")
CALLS = 6


class Console(logging.Handler):
    """Writes to what is `sys.stdout` then."""

    def emit(self, record):
        more = [getattr(record, name, None) for name in ("number", "value")]
        sys.stdout.write(f"{self.format(record)} {more}\n")


@pytest.fixture(autouse=True)
def _console():
    handler = Console()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(funcName)s %(message)s"))
    LOG.setLevel("INFO")
    LOG.propagate = False
    LOG.addHandler(handler)
    yield
    LOG.removeHandler(handler)


def fail_and_log(n):
    try:
        raise ValueError(n)
    except ValueError:
        LOG.exception("step")


def to_memory(*args):
    file = io.StringIO()
    print(*args, file=file)
    with contextlib.redirect_stdout(file):
        print(*args)
    return file.getvalue()


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def statements(n, loss):
    print(f"step {n}: {loss * 0 + n:.2f}", file=sys.stdout)
    if n:
        LOG.info(f"step {(loss * 0 + n).item()} %s", f"of {n:.1f}")


class HOLDER:
    log = LOG
    info = str.title


def in_memory(n):
    file = io.StringIO()
    print(f"step {n:03d}", file=file)
    return file.getvalue()


def not_printing(text, print=len):
    builtins.print(text, print(f"{text}"))


WRITES = {
    "print a text": lambda n, loss: print("step"),
    "print a number": lambda n, loss: print("step", n, sep="=", end=";\n"),
    "print to stderr": lambda n, loss: print("step", n, file=sys.stderr),
    "print a tensor": lambda n, loss: print(n, (loss * 0 + n).long()),
    "print a shape": lambda n, loss: print("step", loss.reshape(1, 1).shape, loss.dtype, loss.device.type),
    "print a tuple": lambda n, loss: print("step", (n, "of", (loss * 0 + n).long())),
    "print NumPy's numbers": lambda n, loss: print("step", np.float64(0.5), np.int32(n)),
    "print a formatted text": lambda n, loss: print(f"step {n:03d}"),
    "print a text by format": lambda n, loss: print("step {:03d} {}: {l:.2f}".format(n, "of", l=(loss * 0 + n).item())),
    "print a value": lambda n, loss: print(f"{(loss * 0 + n).item():.2f}"),
    "print values": lambda n, loss: print(f"step {n:03d}: {(loss * 0 + n).item():>8.2f}", end=f" of {n}\n"),
    "print values as they are": lambda n, loss: print(f"{n}", f"{(loss * 0 + n).item()}", "step", sep=f" {n} "),
    "print texts of texts": lambda n, loss: print(f"step {f'{n:.1f}':>8}{n!r:>4}{n:{n + 3}d}" + f"{n:+d}"),
    "print the value of a tensor": lambda n, loss: print(f"{n} {loss * 0 + n:>8.2f} {(loss * 0 + n).long()}", "step"),
    "statements": statements,
    "print a padded text": lambda n, loss: print(f"step {f'{n:.1f}':>8} {f'of {(loss * 0 + n).item():.1f}'!r:>12}"),
    "print a text that is kept": lambda n, loss: print(text := f"step {n:03d}", len(text), text[-2:]),
    "print a text of a function": lambda n, loss: print(f"step {str.upper(f'{n:x}')}", min(f"{n}", "3")),
    "print one or the other": lambda n, loss: print(f"step {n}" if n % 2 else f"{n:.3f}"),
    "print a formatted text to stderr": lambda n, loss: print(f"step {n}", file=sys.stderr),
    "print a formatted text to memory": lambda n, loss: print(in_memory(n)),
    "print by another function": lambda n, loss: not_printing(f"step {10**n}"),
    "print to memory": lambda n, loss: print(to_memory("step", n)),
    "print a tensor to memory": lambda n, loss: print(to_memory("step", (loss * 0 + n).long())),
    "log a text": lambda n, loss: LOG.info("step"),
    "log a number": lambda n, loss: LOG.warning("step %03d of %d", n, CALLS),
    "log by name": lambda n, loss: LOG.info("step %(n)d", {"n": n}),
    "log a tensor": lambda n, loss: LOG.info("step %d: %.1f", n, loss * 0 + n),
    "log a formatted text": lambda n, loss: LOG.error(f"step {n:03d}"),
    "log values in a text": lambda n, loss: LOG.info(f"step {n}: {loss * 0 + n:.2f} %d", n),
    "log texts of values": lambda n, loss: LOG.info("step %s %s", f"{n}", f"{(loss * 0 + n).item():.1f}"),
    "log by an attribute": lambda n, loss: HOLDER.log.error(f"step {n}", exc_info=False),
    "log a text below the level": lambda n, loss: LOG.debug(f"step {n}"),
    "no logger": lambda n, loss: LOG.info(HOLDER.info(f"step {n}")),
    "log a value": lambda n, loss: LOG.info("value %.1f", (loss * 0 + n).item()),
    "log below the level": lambda n, loss: LOG.debug("step %d", n),
    "log more": lambda n, loss: LOG.info("step", extra={"number": n, "value": (loss * 0 + n).long()}),
    "log an error": lambda n, loss: fail_and_log(n),
    "log now and then": lambda n, loss: n % 3 or LOG.info("step %d: %.1f", n, (loss * 0 + n).item()),
    "both": lambda n, loss: (print("first", n), LOG.info("second %d", n), print((loss * 0 + n).long())),
}


def output(backend, write, fails, capsys):
    torch.manual_seed(0)
    with backend.device:
        net = nn.Linear(2, 1)
    model, optimizer, state = fl.compile(net, backend), torch.optim.SGD(net.parameters(), lr=0.01), {"n": 0}
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    @fl.trace
    def step(x):
        state["n"] += 1
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        write(state["n"], loss.detach())
        if fails == "rate":
            loss = loss * optimizer.param_groups[0]["lr"]
        if fails == "sparse":
            x.to_sparse()
        return loss

    capsys.readouterr()
    for _ in range(CALLS):
        step(torch.ones(1, 2))
    return capsys.readouterr(), step


@pytest.mark.parametrize("fails", ["never", "rate", "sparse"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_each_call_writes_what_eager_pytorch_writes(write, fails, by_kernels, tmp_path, capsys):
    expected, _ = output(fl.backend("CPU"), write, fails, capsys)
    written, _ = output(fl.backend("XLA", artifact_dir=tmp_path), write, fails, capsys)
    assert written.out == expected.out
    assert written.err.count("step") == expected.err.count("step")


COMPILED = [
    "log a tensor",
    "both",
    "print a formatted text",
    "print a value",
    "print values",
    "print values as they are",
    "print a text by format",
]


@pytest.mark.parametrize("write", [WRITES[name] for name in COMPILED], ids=COMPILED)
def test_a_step_that_logs_is_compiled(write, tmp_path, capsys):
    expected, _ = output(fl.backend("CPU"), write, "never", capsys)
    written, step = output(fl.backend("XLA", artifact_dir=tmp_path), write, "never", capsys)
    assert written.out == expected.out
    assert 0 < compilations(step) <= 2


def test_what_is_redirected_in_the_step_goes_there(tmp_path, capsys):
    model = fl.compile(nn.Linear(2, 1), fl.backend("XLA", artifact_dir=tmp_path))

    @fl.trace
    def step(x):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            print("held")
        return model(x).sum() * len(text.getvalue())

    capsys.readouterr()
    assert step(torch.ones(1, 2)) == model(torch.ones(1, 2)).sum() * 5
    assert capsys.readouterr().out == ""


def test_another_thread_prints_numbers_as_they_are(by_kernels, tmp_path, capsys):
    written, _ = output(
        fl.backend("XLA", artifact_dir=tmp_path),
        lambda n, loss: in_a_thread(lambda: print(f"{n:.1f}")),
        "never",
        capsys,
    )
    assert {*written.out.split()} == {f"{n}.0" for n in range(1, CALLS + 1)}


@st.composite
def _printing(draw):
    """Statements that print, or write to what has been printed to, f-strings and texts made by `str.format` of `n`, a
    number that varies, `v`, one that is read, and others."""

    def piece(depth):
        value = draw(
            st.sampled_from(["n", "v", "x", "n + 0.5", "v * 2", "-n", "round(v, 2)", "fixed", "int(v)", "n % 3"])
        )
        kinds = ["plain", "spec", "text", "nested", "repr", "called", "chosen"]
        kind = draw(st.sampled_from(kinds if depth else kinds[:3]))
        if kind == "text":
            return draw(st.sampled_from(["loss ", "{{}} ", "%d ", "\\u00e9 "]))
        if kind == "repr":
            return "{" + value + draw(st.sampled_from(["!r}", "!s}", "=}"]))
        if kind == "nested":
            return "{" + text(depth - 1, "'") + draw(st.sampled_from(["}", ":>12}"]))
        if kind == "called":
            return "{" + draw(st.sampled_from(["len", "str.upper", "repr"])) + f"({text(depth - 1, chr(39))})" + "}"
        if kind == "chosen":
            return "{" + f"{value} if n > 2 else {value}" + "}"
        return "{" + value + ("}" if kind == "plain" else draw(st.sampled_from([":.3f}", ":>10.2e}", ":{width}.1f}"])))

    def text(depth, quote):
        return f"f{quote}{''.join(piece(depth) for _ in range(draw(st.integers(1, 3))))}{quote}"

    def formatted():
        of_numbers = st.tuples(
            st.sampled_from(["{}", "{:.3f}", "{!r:>8}", "{:>10.2e}"]), st.sampled_from(["n", "v", "x"])
        )
        of_texts = st.tuples(st.sampled_from(["{}", "{!r:>8}", "{:>12}", "{{}}{}"]), st.just(text(0, "'")))
        fields = draw(st.lists(st.one_of(of_numbers, of_texts), min_size=1, max_size=3))
        return f'"{" ".join(field for field, _ in fields)}".format({", ".join(value for _, value in fields)})'

    texts = [draw(st.booleans()) and formatted() or text(1, '"') for _ in range(draw(st.integers(1, 3)))]
    lines = []
    for i in range(draw(st.integers(0, len(texts)))):
        lines.append(f"t{i} = {texts[i]}")
        texts[i] = draw(st.sampled_from([f"t{i}", f"'a {{}}'.format(t{i})", f"f'{{t{i}}} {{n}}'", f"f'{{t{i}:>20}}'"]))
    if draw(st.booleans()):
        texts.append(draw(st.sampled_from(["n", "v", "'x'", "*[n, 'y']", f"({text(0, chr(34))}, n)"])))
    if draw(st.integers(0, 3)) == 0:
        return "; ".join([*lines, f"sys.stdout.write(str({texts[0]}))"])
    texts += draw(st.sampled_from([[], ['end=f"{n} ;\\n"'], ["sep='|'"], ["file=sys.stdout"]]))
    return "; ".join([*lines, f"print({', '.join(texts)})"])


class Written:
    """A file of the user's own."""

    def __init__(self):
        self.texts = []

    def write(self, text):
        self.texts.append(text)

    def flush(self):
        pass

    def getvalue(self):
        return "".join(self.texts)


class Wrapper(io.TextIOWrapper):
    """A file of the standard library, as pytest and terminals have one."""

    def __init__(self):
        super().__init__(io.BytesIO(), write_through=True)

    def getvalue(self):
        return self.buffer.getvalue().decode()


@pytest.mark.optimized
@settings(max_examples=scale.of(25, 400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=_printing(), stdout=st.sampled_from([io.StringIO, Written, Wrapper]))
def test_texts_are_printed_as_by_eager_pytorch(call, stdout, by_kernels):
    try:
        code = compile(f"def write(n, v, x, width=9, fixed=2.5): {call}", "<printing>", "exec")
    except SyntaxError:  # what only Python 3.12 takes
        assume(False)
    assume(stdout is not Wrapper or "stdout.write" not in call)  # may be written twice, with a warning
    names = {"sys": sys}
    exec(code, names)

    def run(traced):
        state = {"n": 0}

        def step(x):
            state["n"] += 1
            total = x.sum() + state["n"] * 0.25
            names["write"](state["n"], total.item(), total)
            return total

        step = fl.trace(step) if traced else step
        if traced:
            fl.backend("XLA")
        with contextlib.redirect_stdout(stdout()) as out:
            for number in range(4):
                step(torch.full((2,), float(number)))
        return out.getvalue()

    assert run(True) == run(False)
