"""Settings objects that reject misspelt names."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from .errors import SettingError


def check_name(owner: Any, name: str, known: Any) -> None:
    """Refuse to set `name` in `owner`, unless it is `known`.

    Raises:
        SettingError: with the names that there are, and the one that may have been meant.
    """
    if name in known:
        return
    shown = sorted(n for n in known if not n.startswith("_"))
    near = difflib.get_close_matches(name, shown, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise SettingError(
        f"{type(owner).__name__} has no setting {name!r}, so setting it would do nothing.{hint} It has "
        f"{', '.join(shown)}."
    )


@dataclasses.dataclass
class Settings:
    """A base of dataclasses. What is set later is checked as what is given to the constructor is: its name, and by
    `__post_init__` its value. A subclass of a user's may have attributes of its own.

    Itself one, without fields: what reads a configuration takes a dataclass apart only if its bases are dataclasses.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        own = type(self).__module__.partition(".")[0] == __package__
        if own:
            check_name(self, name, self.__dataclass_fields__)
        there = all(field.name in self.__dict__ for field in dataclasses.fields(self) if field.init)
        before = self.__dict__.get(name)
        object.__setattr__(self, name, value)
        if not there or not own or name.startswith("_"):
            return
        try:
            self.__post_init__()
        except BaseException:
            object.__setattr__(self, name, before)
            raise

    def __post_init__(self) -> None:
        """Check the values."""
