"""A training run as a process: `python -m tests.trainer.process FOLDER BACKEND STEPS EVERY LOADER`; prints its bits."""

import signal
import sys
import warnings

import firstloss as fl
from firstloss.trainer import Callback, Checkpoint

from . import small
from .small import bits, trainer


class Slow(Callback):
    """Slow enough to be killed."""

    def on_step_end(self, trainer):
        import time

        time.sleep(0.01)


def main():
    folder, backend, steps, every = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    backend = fl.backend(backend, artifact_dir=f"{folder}/artifacts")
    run = trainer(folder, backend, max_steps=steps, checkpoint=Checkpoint(steps=every), callbacks=[Slow()])
    warnings.filterwarnings("ignore", ".*worker processes in total")  # PyTorch, of more workers than cores
    run.fit(getattr(small, sys.argv[5])())
    print(bits(run))


if __name__ == "__main__":
    # Ctrl-C is ignored in the background of a script, and so by tests started there
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
