"""What a traced step has not yet, where a number will be once it has been run."""

from __future__ import annotations

from typing import Any

from ...errors import TraceError
from ...program.source import here


class UnavailableNumber:
    """Stands in a parameter group, while a step is traced, for a number that a scheduler sets when it has been run."""

    def __init__(self, what: str, scheduler: str) -> None:
        self._text = (
            f"the traced step reads {what} after {scheduler}.step(), which runs in Python when the step has been run. "
            "Read it before, or outside of the traced step."
        )

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        """Say that there is nothing yet."""
        raise TraceError(f"{here()}: {self._text}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = refuse
    __pow__ = __rpow__ = __float__ = __int__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __format__ = refuse
    __iter__ = __getitem__ = __len__ = refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [value for value in (*args, *(kwargs or {}).values()) if type(value) is cls]
        return found[0].refuse() if found else NotImplemented
