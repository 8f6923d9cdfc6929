"""Nothing of the process moves because Firstloss imports something: generators, handlers, filters, threads."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from firstloss.dependencies import _own_numpy_draws

_PROGRAM = """
import gc, hashlib, locale, logging, os, random, signal, sys, threading, warnings
import numpy as np
import torch
import firstloss as fl

def state():
    name, words, *rest = np.random.get_state()
    return {
        "random": hash(random.getstate()),
        "numpy": (words.tobytes(), rest),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "handlers": [signal.getsignal(s) for s in sorted(signal.valid_signals())],
        # PyTorch's shape functions import sympy, as its optimizers do in any training.
        "filters": [f for f in warnings.filters if not f[2].__module__.startswith("sympy.")],
        "locale": locale.setlocale(locale.LC_ALL),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "logging": (logging.root.level, list(logging.root.handlers)),
        "interpreter": (sys.getrecursionlimit(), sys.excepthook, threading.excepthook),
        "errors": np.geterr(),
        "rand": np.random.rand,
        "folder": os.getcwd(),
    }

assert "jax" not in sys.modules
before = state()
{use}
assert "jax" in sys.modules, "the test must import it"
after = state()
changed = [name for name in before if before[name] != after[name]]
assert not changed, [(name, before[name], after[name]) for name in changed]
"""

USES = {
    "a step": """
backend = fl.backend("XLA", artifact_dir={folder!r})
with backend.device:
    model = torch.nn.Linear(4, 4)
compiled = fl.compile(model, backend)
x = torch.ones(2, 4)
before = state()  # initializing the weights has drawn from PyTorch's generator, as it must

@fl.trace
def step(x):
    return compiled(x).sum()

for _ in range(3):
    step(x).item()
""",
    "a backend that compiles at once": """
fl.backend("XLA", artifact_dir={folder!r}, first_loss="compiled")
""",
    "a mesh": """
fl.backend("XLA", artifact_dir={folder!r}, mesh={{"fsdp": 1}}).parameters()
import jax
""",
    "a module": """
with fl.deferred():
    linear = torch.nn.Linear(4, 4)
before = state()
fl.init_program(linear).to_stablehlo()
""",
    "weights made by XLA": """
with fl.deferred():
    linear = torch.nn.Linear(16, 4)
before = state()
fl.init_program(linear).run()
""",
    "dropout": """
backend = fl.backend("XLA", artifact_dir={folder!r})
with backend.device:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
compiled, optimizer = fl.compile(model, backend), torch.optim.SGD(model.parameters(), lr=0.1)

@fl.trace
def step(x):
    optimizer.zero_grad()
    loss = compiled(x).sum()
    loss.backward()
    optimizer.step()
    return loss

x = torch.ones(2, 4)
before = state()
for _ in range(3):
    step(x).item()
""",
    "the user": "import jax",
    "the user, in a step": """
@fl.trace
def step(x):
    import jax
    return x.sum() + 1

backend = fl.backend("XLA", artifact_dir={folder!r})
before = state()
for _ in range(3):
    step(torch.ones(2)).item()
""",
    "running a module": "fl.run_stablehlo",
    "registering a lowering": "fl.register_lowering",
}


@pytest.mark.parametrize("use", USES)
def test_importing_jax_moves_nothing(use, tmp_path):
    program = _PROGRAM.replace("{use}", USES[use].format(folder=str(tmp_path / "artifacts")))
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_other_threads_draw_from_the_shared_generator_while_jax_is_imported():
    np.random.seed(3)
    expected = np.random.rand(4)
    np.random.seed(3)
    with _own_numpy_draws():
        np.random.rand(7)
        np.random.standard_normal(2)
        with ThreadPoolExecutor(1) as pool:
            drawn = pool.submit(lambda: np.random.rand(4)).result()
    assert drawn.tobytes() == expected.tobytes()
    assert np.random.rand.__self__ is np.random.get_state.__self__
