"""`firstloss.optim.scheduler`, with `cerebras.pytorch`'s base class for schedules of one's own."""

from ...optim.scheduler import *  # noqa: F403
from ...optim.scheduler import __all__ as __all__
from .subclassing import Scheduler as Scheduler  # type: ignore[assignment]
