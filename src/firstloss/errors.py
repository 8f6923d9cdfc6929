"""Every error that Firstloss raises: what happened, where, why it cannot work, and what to write instead."""

from __future__ import annotations


class FirstlossError(Exception):
    """Base class of Firstloss's errors."""


class CompatibilityError(FirstlossError, ImportError):
    """The installed version of a library lacks a private name that Firstloss needs."""


class CaptureError(FirstlossError, RuntimeError):
    """Something in a constructor cannot be captured."""


class NothingDeferredError(FirstlossError, TypeError):
    """A constructor returned nothing that contains a tensor."""


class ElsewhereError(FirstlossError, BufferError, RuntimeError):
    """Code that bypasses PyTorch's dispatcher asked for writable memory of a tensor that is on another device."""


class ConstantChangedError(FirstlossError, RuntimeError):
    """A tensor from outside the capture that a recipe reads was edited before materialization."""


class MaterializeError(FirstlossError, RuntimeError):
    """A recipe could not be run."""


class MetaTensorsWarning(UserWarning):
    """A module to be materialized also has tensors on the meta device, which have neither values nor recipes."""


class CacheFolderWarning(UserWarning):
    """The folder for compiled steps cannot be used, so that they are compiled again at each start."""


class NoEffectWarning(UserWarning):
    """A setting of Cerebras' hardware was made, which has no effect here."""


class MissingKernelsWarning(UserWarning):
    """Parts of Firstloss that are written in C were not built, which makes it slower."""


class UnusedAcceleratorWarning(UserWarning):
    """The machine has an accelerator that JAX was installed without, so that compiled steps run on the CPU."""


class NotMaterializedWarning(UserWarning):
    """A deferred module was used before it was materialized, so all of it is materialized now."""


class UnwrittenWeightsError(FirstlossError, RuntimeError):
    """Parameters or buffers hold whatever was in their memory before, since nothing has written them."""


class UnwrittenWeightsWarning(UserWarning):
    """As `UnwrittenWeightsError`, where only a warning was asked for."""


class RankDependentWeightsWarning(UserWarning):
    """Each rank has drawn weights for itself, so that their values depend on the number of ranks."""


class SaveError(FirstlossError, OSError):
    """Weights could not be written to disk."""


class UnsavableError(FirstlossError, TypeError):
    """An object to be saved holds something that is neither a tensor nor plain data."""


class CheckpointError(FirstlossError, ValueError):
    """A checkpoint is damaged, truncated, or not a checkpoint."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint at the given path."""


class TraceError(FirstlossError, RuntimeError):
    """A step cannot be traced.

    Attributes:
        can_run_eagerly: whether its Python may run without a trace instead: whether it has done nothing yet, or all
            that it had done was undone.
    """

    can_run_eagerly = False


class NotTraceableError(TraceError):
    """A step cannot be traced at this call because of its arguments, or of modes around it."""

    can_run_eagerly = True


class GraphChangedError(TraceError):
    """A traced step would do something different now than when it was traced."""


class GraphChangeWarning(UserWarning):
    """A traced step does something different than before, or got a new kind of batch, and is retraced or recompiled."""


class EagerStepWarning(UserWarning):
    """A traced step runs eagerly: it reads values, or, on the "GPU" backend, cannot be replayed as a CUDA graph."""


class ShapeError(TraceError, ValueError):
    """A traced step got a batch with shapes that it does not accept."""


class ValueReadError(TraceError):
    """A step read the value of a traced tensor where that is refused, or where it has none."""


class StepAssertionError(FirstlossError, RuntimeError):
    """A condition that a traced step asserts (`torch._assert_async`) was False."""


class LoweringError(FirstlossError, NotImplementedError):
    """An ATen operation has no StableHLO rule, or its rule disagrees with what capture recorded."""


class StateLostError(FirstlossError, RuntimeError):
    """The device failed during a step to which the weights had been donated."""


class StepMemoryError(FirstlossError, MemoryError):
    """The device lacks memory for a step's temporaries."""


class ClosureError(FirstlossError, RuntimeError):
    """A closure was called where it cannot run."""


class LoaderError(FirstlossError, RuntimeError):
    """A data loader failed, ended early, or cannot be used as one."""


class ExecutorError(FirstlossError, ValueError):
    """A DataExecutor got invalid numbers."""


class BackendError(FirstlossError, ValueError):
    """An unknown backend, one that this machine does not support, or a tensor on one where that is refused."""


class ProcessLostError(FirstlossError, RuntimeError):
    """Another process of the run has ended, or can no longer be reached."""


class SettingError(FirstlossError, AttributeError):
    """A setting that does not exist was set, which would have no effect."""


class MissingDependencyError(FirstlossError, ImportError):
    """An optional dependency is not installed."""


class TargetError(FirstlossError, ImportError):
    """A command's TARGET cannot be found or called."""


class PlanError(FirstlossError, ValueError):
    """A model, a mesh and a batch do not fit together, or a plan's numbers are invalid."""


class TrainerError(FirstlossError, ValueError):
    """The Trainer got arguments that do not fit together, or that it cannot use."""


class NaNLossError(FirstlossError, FloatingPointError):
    """The loss is not finite. `step` is the step, and `batch` its batch, if known."""

    step: int | None = None
    batch: object = None


class ScheduleError(FirstlossError, ValueError):
    """A schedule's arguments are invalid or contradict each other, or there is nothing to set."""


class OptimizerError(FirstlossError, ValueError):
    """An optimizer's arguments are invalid."""


class MetricError(FirstlossError, ValueError):
    """A metric got invalid values, or was read before its first update."""


class SummaryError(FirstlossError, ValueError):
    """A summary cannot be written or read."""


class ConfigError(FirstlossError, ValueError):
    """A run file, or an override of it, is invalid."""


class PrecisionError(FirstlossError, ValueError):
    """A precision does not exist, or loss scaling is used in the wrong order."""


class ModuleTextError(FirstlossError, ValueError):
    """A file is not a complete StableHLO module written by Firstloss."""


class ShardingError(FirstlossError, ValueError):
    """A sharding refers to an axis, a dimension, a weight or a device that does not exist."""
