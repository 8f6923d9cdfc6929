"""`firstloss.utils.tensorboard` under the name of `cerebras.pytorch`."""

from ...utils.tensorboard import SummaryReader, SummaryWriter, summarize_scalar, summarize_tensor

__all__ = ["SummaryReader", "SummaryWriter", "summarize_scalar", "summarize_tensor"]
