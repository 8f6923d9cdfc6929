"""`firstloss.utils.tensorboard`, where `cerebras.pytorch` has it."""

from ...utils.tensorboard import SummaryReader, SummaryWriter, summarize_scalar, summarize_tensor

__all__ = ["SummaryReader", "SummaryWriter", "summarize_scalar", "summarize_tensor"]
