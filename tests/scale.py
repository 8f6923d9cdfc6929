"""The share of a class of cases that a test covers: representatives in `make test`, all in `make sweep`."""

import os
from typing import TypeVar

T = TypeVar("T")


def of(few: T, all: T) -> T:
    """`all` where tests are compiled as users do, which is what `make sweep` asks for."""
    return all if os.environ.get("FIRSTLOSS_AS_USERS") else few
