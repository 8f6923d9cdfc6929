"""`firstloss.optim.lr_scheduler`, with `cerebras.pytorch`'s base class for schedules of one's own."""

from ...optim.lr_scheduler import *  # noqa: F403
from ...optim.lr_scheduler import __all__ as __all__
from .subclassing import LRScheduler as LRScheduler  # type: ignore[assignment]
