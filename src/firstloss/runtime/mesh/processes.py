"""The processes of a run, and barriers among them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Processes:
    """This process among all that train together: number `index` of `count`."""

    index: int
    count: int

    def wait(self, what: str) -> None:
        """Wait until all have come here."""
        if self.count > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices(f"firstloss {what}")

    def agree(self, text: str) -> str:
        """Process 0's `text` (up to 64 ASCII characters), for all."""
        if self.count == 1:
            return text
        import numpy as np
        from jax.experimental import multihost_utils

        line = np.frombuffer(text.encode().ljust(64), np.uint8)
        return bytes(np.asarray(multihost_utils.broadcast_one_to_all(line))).decode().strip()

    def highest(self, number: int) -> int:
        """The largest of the numbers that the processes give."""
        if self.count == 1:
            return number
        import numpy as np
        from jax.experimental import multihost_utils

        return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def processes(backend: Any = None) -> Processes:
    """As JAX counts them, where the backend (by default the current one) runs on JAX; else this one alone."""
    from .. import backend as backends

    backend = backend or backends.current_backend(raise_exception=False)
    if backend is None or not backend.is_xla or "jax" not in sys.modules:
        return Processes(0, 1)
    import jax

    return Processes(jax.process_index(), jax.process_count())
