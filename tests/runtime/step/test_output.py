"""What a traced step prints and logs: at each call what eager PyTorch prints, once, whether it is compiled or not."""

import contextlib
import io
import logging
import sys

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
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


WRITES = {
    "print a text": lambda n, loss: print("step"),
    "print a number": lambda n, loss: print("step", n, sep="=", end=";\n"),
    "print to stderr": lambda n, loss: print("step", n, file=sys.stderr),
    "print a tensor": lambda n, loss: print(n, (loss * 0 + n).long()),
    "print a shape": lambda n, loss: print("step", loss.reshape(1, 1).shape, loss.dtype, loss.device.type),
    "print a tuple": lambda n, loss: print("step", (n, "of", (loss * 0 + n).long())),
    "print NumPy's numbers": lambda n, loss: print("step", np.float64(0.5), np.int32(n)),
    "print a formatted text": lambda n, loss: print(f"step {n:03d}"),
    "print a value": lambda n, loss: print(f"{(loss * 0 + n).item():.2f}"),
    "print to memory": lambda n, loss: print(to_memory("step", n)),
    "print a tensor to memory": lambda n, loss: print(to_memory("step", (loss * 0 + n).long())),
    "log a text": lambda n, loss: LOG.info("step"),
    "log a number": lambda n, loss: LOG.warning("step %03d of %d", n, CALLS),
    "log by name": lambda n, loss: LOG.info("step %(n)d", {"n": n}),
    "log a tensor": lambda n, loss: LOG.info("step %d: %.1f", n, loss * 0 + n),
    "log a formatted text": lambda n, loss: LOG.error(f"step {n:03d}"),
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


@pytest.mark.parametrize("write", [WRITES["log a tensor"], WRITES["both"]], ids=["log a tensor", "both"])
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
