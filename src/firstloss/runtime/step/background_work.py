"""The rest of a step after its first results, run in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ... import timeline


class BackgroundWork(Future):
    """A future of the results of the rest of a step, by key.

    Attributes:
        failed: called when a result is requested and computing it has failed.
    """

    failed: Callable[[BaseException], None] = staticmethod(lambda error: None)

    def __init__(self, finish: Callable[[], dict[Any, Any]]) -> None:
        """`finish` computes the results; it is called in the thread."""
        super().__init__()
        self._finish: Callable[[], dict[Any, Any]] | None = finish

    def begin(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._work, name="firstloss-first-step").start()

    def _work(self) -> None:
        finish, self._finish = self._finish, None  # freed when it has run
        if finish is None or not self.set_running_or_notify_cancel():  # interrupted before it began
            return
        try:
            from ..jax_support import x64

            with timeline.span("rest of the step"), x64():
                made = finish()
        except BaseException as error:  # re-raised where the state is needed
            self.set_exception(error)
        else:
            self.set_result(made)

    def of(self, key: Any) -> Any:
        """Wait for a result."""
        try:
            return self.result()[key]
        except BaseException:
            if self.done() and (error := self.exception()) is not None:
                self.failed(error)
            raise
