"""Constructors that print, or that exit the process."""

import atexit
import os
import subprocess
import sys
import threading

from torch import nn


def printing():
    print("a line from the constructor")
    sys.stdout.write("and another")
    os.write(1, b"past Python\n")
    subprocess.run([sys.executable, "-c", "print('from a process')"], check=True)
    thread = threading.Thread(target=print, args=("from a thread",))
    thread.start()
    thread.join()
    if "pytest" not in sys.modules:
        atexit.register(print, "at the end")
    return nn.Linear(2, 3)


def leaving(code=0):
    sys.exit(code)


def leaving_without_a_word():
    raise SystemExit
