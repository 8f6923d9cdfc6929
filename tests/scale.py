"""The share of a class of cases that a test covers: representatives in `make test`, all in `make sweep`."""

import os
from typing import TypeVar

T = TypeVar("T")


def of(few: T, all: T) -> T:
    """`all` if tests are compiled as for users, as in `make sweep`; otherwise `few`."""
    return all if os.environ.get("FIRSTLOSS_AS_USERS") else few
