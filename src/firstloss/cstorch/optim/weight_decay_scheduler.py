"""`firstloss.optim.weight_decay_scheduler`, with `cerebras.pytorch`'s base class for schedules of one's own."""

from ...optim.weight_decay_scheduler import *  # noqa: F403
from ...optim.weight_decay_scheduler import __all__ as __all__
from .subclassing import WeightDecayScheduler as WeightDecayScheduler  # type: ignore[assignment]
