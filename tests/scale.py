"""How much of a class a test goes through: what stands for it in `make test`, all of it in `make sweep`."""

import os
from typing import TypeVar

T = TypeVar("T")


def of(few: T, all: T) -> T:
    """`all` where tests are compiled as users do, which is what `make sweep` asks for."""
    return all if os.environ.get("FIRSTLOSS_AS_USERS") else few
