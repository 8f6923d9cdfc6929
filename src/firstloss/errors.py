"""Every error that Firstloss raises: each says what happened, where, why it cannot work and what to write instead."""

from __future__ import annotations


class FirstlossError(Exception):
    """The base of all of them."""


class CompatibilityError(FirstlossError, ImportError):
    """The installed version of a library lacks a private name that Firstloss needs for what was asked."""


class CaptureError(FirstlossError, RuntimeError):
    """Something in a constructor cannot be captured."""


class NothingDeferredError(FirstlossError, TypeError):
    """A constructor returned nothing that holds a tensor."""


class ElsewhereError(FirstlossError, BufferError, RuntimeError):
    """Code past PyTorch's dispatcher asked for memory to write to, and the tensor's is on another device."""


class ConstantChangedError(FirstlossError, RuntimeError):
    """A tensor from outside that a recipe reads was edited between capture and materialization."""


class MaterializeError(FirstlossError, RuntimeError):
    """A recipe could not be run."""


class MetaTensorsWarning(UserWarning):
    """A module that is made real has tensors on the meta device too, which have no values and no recipes."""


class NotMaterializedWarning(UserWarning):
    """A module that is still deferred was used; all of it is made now, at a moment that nobody chose."""


class SaveError(FirstlossError, OSError):
    """Weights could not be written to disk."""


class UnsavableError(FirstlossError, TypeError):
    """A checkpoint was asked to hold what is neither a tensor nor plain data."""


class CheckpointError(FirstlossError, ValueError):
    """A checkpoint is damaged, cut short, or no checkpoint at all."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint where one was asked for."""


class TraceError(FirstlossError, RuntimeError):
    """A step cannot be traced."""


class GraphChangedError(TraceError):
    """A traced step would do something else now than when it was traced."""


class GraphChangeWarning(UserWarning):
    """A traced step does something else than before, or has met a new kind of batch: it is retraced or recompiled."""


class EagerStepWarning(UserWarning):
    """A traced step runs eagerly on the "GPU" backend, where it was to be replayed as a CUDA graph."""


class ShapeError(TraceError, ValueError):
    """A traced step was given a batch of other shapes than it is meant to take."""


class ValueReadError(TraceError):
    """A step asked for the value of a traced tensor; there is none until the step runs."""


class StepAssertionError(FirstlossError, RuntimeError):
    """A condition that a traced step asserts (`torch._assert_async`) did not hold when the step had run."""


class LoweringError(FirstlossError, NotImplementedError):
    """An ATen operation has no StableHLO rule, or its rule disagrees with what capture recorded."""


class StateLostError(FirstlossError, RuntimeError):
    """The device failed in the middle of a step, when it had been given the memory of the weights."""


class StepMemoryError(FirstlossError, MemoryError):
    """The device has no memory for what a step computes on the way."""


class ClosureError(FirstlossError, RuntimeError):
    """A closure was called where it cannot run."""


class LoaderError(FirstlossError, RuntimeError):
    """A data loader failed, ended early, or cannot be used as one."""


class ExecutorError(FirstlossError, ValueError):
    """A DataExecutor was given numbers that make no loop."""


class BackendError(FirstlossError, ValueError):
    """An unknown backend, or one that this machine cannot give."""


class ProcessLostError(FirstlossError, RuntimeError):
    """Another of the processes of the run has ended, or cannot be reached any more."""


class SettingError(FirstlossError, AttributeError):
    """Something was set that does not exist, and so would have been ignored."""


class MissingDependencyError(FirstlossError, ImportError):
    """An optional dependency is needed and is not installed."""


class TargetError(FirstlossError, ImportError):
    """A command's TARGET cannot be found or called."""


class PlanError(FirstlossError, ValueError):
    """A model, a mesh and a batch do not go together, or a plan was asked for in numbers that are none."""


class TrainerError(FirstlossError, ValueError):
    """The Trainer was given what does not fit together, or what it cannot use."""


class NaNLossError(FirstlossError, FloatingPointError):
    """The loss is no longer a number. `step` is the step, `batch` the batch it came from, if it is known."""

    step: int | None = None
    batch: object = None


class ScheduleError(FirstlossError, ValueError):
    """A schedule that cannot be: arguments that contradict each other, or nothing to set."""


class OptimizerError(FirstlossError, ValueError):
    """An optimizer's arguments make no sense."""


class MetricError(FirstlossError, ValueError):
    """A metric is given what it cannot compute of, or asked before it was given anything."""


class SummaryError(FirstlossError, ValueError):
    """A summary cannot be written or read."""


class ConfigError(FirstlossError, ValueError):
    """A run's configuration file, or what overrides it, is wrong."""


class PrecisionError(FirstlossError, ValueError):
    """A precision that is not there, or loss scaling in an order that makes no sense."""


class ModuleTextError(FirstlossError, ValueError):
    """A file is no StableHLO module that Firstloss wrote, or not all of it."""


class ShardingError(FirstlossError, ValueError):
    """A sharding names what is not there: an axis, a dimension, a weight, a device."""
