"""A program under construction: named pieces of text, each of which can be removed separately."""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass, field

STEPS = 8
_MODULES = {
    "abc": "import abc",
    "argparse": "import argparse",
    "array": "import array",
    "ast": "import ast",
    "asyncio": "import asyncio",
    "cf": "import concurrent.futures as cf",
    "collections": "import collections",
    "configparser": "import configparser",
    "contextlib": "import contextlib",
    "contextvars": "import contextvars",
    "copy": "import copy",
    "csv": "import csv",
    "ctypes": "import ctypes",
    "dataclasses": "import dataclasses",
    "datetime": "import datetime",
    "decimal": "import decimal",
    "enum": "import enum",
    "F": "import torch.nn.functional as F",
    "fractions": "import fractions",
    "functools": "import functools",
    "gc": "import gc",
    "hashlib": "import hashlib",
    "heapq": "import heapq",
    "inspect": "import inspect",
    "io": "import io",
    "itertools": "import itertools",
    "json": "import json",
    "logging": "import logging",
    "math": "import math",
    "mock": "import unittest.mock as mock",
    "np": "import numpy as np",
    "operator": "import operator",
    "os": "import os",
    "P": "import torch.nn.utils.parametrizations as P",
    "parametrize": "import torch.nn.utils.parametrize as parametrize",
    "pathlib": "import pathlib",
    "pickle": "import pickle",
    "queue": "import queue",
    "random": "import random",
    "re": "import re",
    "shutil": "import shutil",
    "statistics": "import statistics",
    "string": "import string",
    "struct": "import struct",
    "sys": "import sys",
    "tempfile": "import tempfile",
    "threading": "import threading",
    "types": "import types",
    "typing": "import typing",
    "warnings": "import warnings",
    "weakref": "import weakref",
    "zlib": "import zlib",
}


@dataclass
class Draft:
    """The parts that features add to one program.

    Text for the step may say `$m`, `$o` and `$c` for the model, its optimizer and the compiled model, which are
    variables or attributes of `self`.

    Attributes:
        form: how the step is written; see `forms.py`.
        top: classes, functions and variables of the module.
        early: statements of `program` before there is a model; `setup`: after there is an optimizer.
        pre, mid, grads, post: statements of the step: before the forward pass, between it and `backward` (they may read
            `out` and change `loss`), between `backward` and the optimizer, and after that.
        between: statements in the loop around the step, by the number of the step that they come before.
        each: statements before every step.
        end: statements after the loop.
        free, module: variables of `program` and of the module that the step assigns.
        names: all variables of `program` that the step may mention.
    """

    rng: random.Random
    form: str = "function"
    double: bool = True
    batch: list[str] = field(default_factory=list)
    top: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    construct: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    pre: list[str] = field(default_factory=list)
    mid: list[str] = field(default_factory=list)
    grads: list[str] = field(default_factory=list)
    update: list[str] = field(default_factory=list)
    post: list[str] = field(default_factory=list)
    between: dict[int, list[str]] = field(default_factory=dict)
    each: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    free: list[str] = field(default_factory=list)
    module: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)  # statements of the constructor of the step's class
    # attributes of the model that have a weight and a bias
    linears: list[str] = field(default_factory=lambda: ["a", "z"])
    results: list[str] = field(default_factory=list)  # results of the step besides the loss
    pieces: list[str] = field(default_factory=list)  # the names of the functions that contributed
    catches: bool = False  # whether the loop catches errors of the step
    _count: int = 0

    def name(self, stem: str) -> str:
        """A new variable name."""
        self._count += 1
        name = f"{stem}{self._count}"
        self.names.append(name)
        return name

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, *options):
        return self.rng.choice(options)

    def at(self, text: str, step: int | None = None) -> None:
        """Run `text` before step `step`, by default one in the middle."""
        when = self.rng.randint(2, STEPS - 2) if step is None else step
        self.between.setdefault(when, []).append(text)


def block(text: str, indent: int = 0) -> str:
    """`text` without its own indentation, indented by `indent` levels."""
    return textwrap.indent(textwrap.dedent(text).strip("\n"), "    " * indent)


def imports(text: str) -> list[str]:
    """The imports that `text` needs."""
    import re

    return [line for name, line in _MODULES.items() if re.search(rf"(?<![\w.]){name}\.", text)]
