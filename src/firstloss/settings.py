"""Settings objects that reject misspelt names."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from .errors import SettingError


def check_name(owner: Any, name: str, known: Any) -> None:
    """Raise unless `name` is a `known` setting of `owner`.

    Raises:
        SettingError: with the known names, and the one that was probably meant.
    """
    if name in known:
        return
    public = sorted(n for n in known if not n.startswith("_"))
    near = difflib.get_close_matches(name, public, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise SettingError(
        f"{type(owner).__name__} has no setting {name!r}, so setting it would have no effect.{hint} Its settings are "
        f"{', '.join(public)}."
    )


@dataclasses.dataclass
class Settings:
    """Base of dataclasses whose attributes are checked when they are set later, like constructor arguments: the name,
    and the value by `__post_init__`. Users' subclasses may have other attributes.

    It is itself a dataclass without fields, because jsonargparse requires that of a dataclass's bases.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        own = type(self).__module__.partition(".")[0] == __package__
        if own:
            check_name(self, name, self.__dataclass_fields__)
        initialized = all(field.name in self.__dict__ for field in dataclasses.fields(self) if field.init)
        before = self.__dict__.get(name)
        object.__setattr__(self, name, value)
        if not initialized or not own or name.startswith("_"):
            return
        try:
            self.__post_init__()
        except BaseException:
            object.__setattr__(self, name, before)
            raise

    def __post_init__(self) -> None:
        """Check the values."""
