"""The processes of a run, and their barriers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Processes:
    """This process among all that train together: `index` of `count`."""

    index: int
    count: int

    def wait(self, name: str) -> None:
        """Wait until all processes have reached this point."""
        if self.count > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices(f"firstloss {name}")

    def agree(self, text: str) -> str:
        """Broadcast process 0's `text` (up to 64 ASCII characters)."""
        if self.count == 1:
            return text
        import numpy as np
        from jax.experimental import multihost_utils

        line = np.frombuffer(text.encode().ljust(64), np.uint8)
        return bytes(np.asarray(multihost_utils.broadcast_one_to_all(line))).decode().strip()

    def highest(self, number: int) -> int:
        """The maximum of the processes' numbers."""
        if self.count == 1:
            return number
        import numpy as np
        from jax.experimental import multihost_utils

        return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def processes(backend: Any = None) -> Processes:
    """JAX's processes, if the backend (by default the current one) runs on JAX; otherwise this one alone."""
    from .. import backend as backends

    backend = backend or backends.current_backend(raise_exception=False)
    if backend is None or not backend.is_xla or "jax" not in sys.modules:
        return Processes(0, 1)
    import jax

    return Processes(jax.process_index(), jax.process_count())
