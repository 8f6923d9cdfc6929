"""Nothing is silently ignored: an argument or attribute has an effect, or is an error."""

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.trainer import Checkpoint, Logging, Precision, Trainer, TrainingLoop, ValidationLoop

SETTINGS = [
    lambda backend: backend.device.config,
    lambda backend: backend.device,
    lambda backend: backend,
    lambda backend: fl.distributed.ClusterConfig(),
    lambda backend: Precision(),
    lambda backend: TrainingLoop(max_steps=1),
    lambda backend: ValidationLoop(),
    lambda backend: Checkpoint(),
    lambda backend: Logging(),
]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_an_unknown_attribute_is_an_error(number, backend):
    settings = SETTINGS[number](backend)
    before = dict(vars(settings))
    with pytest.raises(fl.errors.SettingError, match="has no setting 'unknown_thing'"):
        settings.unknown_thing = 1
    assert vars(settings) == before
    assert issubclass(fl.errors.SettingError, AttributeError)


@pytest.mark.parametrize(
    "make, name, near",
    [
        (lambda b: b.device.config, "lazy_initialisation", "lazy_initialization"),
        (lambda b: TrainingLoop(max_steps=1), "max_step", "max_steps"),
        (lambda b: Precision(), "loss_scael", "loss_scale"),
        (lambda b: fl.distributed.ClusterConfig(), "num_csxs", "num_csx"),
    ],
)
def test_the_closest_name_is_suggested(make, name, near, backend):
    with pytest.raises(fl.errors.SettingError, match=f"Did you mean {near}?"):
        setattr(make(backend), name, 1)


@pytest.mark.parametrize(
    "make, name, value",
    [
        (lambda b: b.device.config, "lazy_initialization", "no"),
        (lambda b: TrainingLoop(max_steps=1), "max_steps", -1),
        (lambda b: Precision("float16"), "loss_scale", -1.0),
        (lambda b: Precision(), "loss_scale", 2.0),
        (lambda b: Precision(), "dtype", "float8"),
        (lambda b: Logging(), "log_steps", 0),
        (lambda b: Checkpoint(), "mode", "best"),
        (lambda b: fl.distributed.ClusterConfig(), "num_csx", 0),
        (lambda b: fl.distributed.ClusterConfig(), "num_workers_per_csx", -1),
    ],
)
def test_values_set_later_are_checked(make, name, value, backend):
    settings = make(backend)
    before = getattr(settings, name)
    with pytest.raises(ValueError, match=name):
        setattr(settings, name, value)
    assert getattr(settings, name) == before


def test_a_users_subclass_may_have_attributes(backend):
    class Mine(Logging):
        pass

    optimizer = Mine()
    optimizer.anything = 1
    assert optimizer.anything == 1


@pytest.mark.parametrize("name", ["mesh", "name", "is_xla", "torch_device", "artifact_dir"])
def test_settings_fixed_at_creation_cannot_be_changed(name, backend):
    with pytest.raises(fl.errors.BackendError, match=f"{name} cannot be changed once"):
        setattr(backend, name, None)


BACKENDS = {
    "a mesh for one that is there": lambda b: fl.backend(b, mesh={"data": 1}),
    "a mesh for the current one": lambda b: fl.backend(mesh={"data": 1}),
    "a folder for the current one": lambda b: fl.backend(artifact_dir="elsewhere"),
    "a cluster for the current one": lambda b: fl.backend(cluster_config=fl.distributed.ClusterConfig()),
    "two meshes": lambda b: fl.backend("XLA", mesh={"data": 1}, cluster_config=fl.distributed.ClusterConfig()),
    "no name": lambda b: fl.backend(3),
    "no cluster": lambda b: fl.backend("XLA", cluster_config={"num_csx": 1}),
    "a mesh for eager PyTorch": lambda b: fl.backend("CPU", mesh={"data": 1}),
    "workers": lambda b: fl.distributed.ClusterConfig(num_workers_per_csx=-2),
    "whether it is true": lambda b: fl.distributed.ClusterConfig(num_csx=True),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_arguments_without_effect_are_refused(name, backend):
    with pytest.raises(fl.errors.BackendError):
        BACKENDS[name](backend)
    assert fl.backend() is backend


@pytest.mark.parametrize("scale", [0, 0.0, -1, -1.0, True, float("nan"), float("inf"), "static", [1.0]])
def test_a_loss_scale_is_dynamic_or_positive(scale):
    with pytest.raises(fl.errors.PrecisionError, match="loss_scale is 'dynamic' or a positive number"):
        fl.amp.GradScaler(scale)
    with pytest.raises(ValueError, match="loss_scale"):
        Precision("float16", loss_scale=scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", ["dynamic", 1.0, 128])
def test_a_loss_scale_without_effect_is_refused(dtype, scale):
    with pytest.raises(ValueError, match="has no effect"):
        Precision(dtype, loss_scale=scale)


DYNAMIC = {"init_scale": 8.0, "steps_per_increase": 2, "min_loss_scale": 1.0, "max_loss_scale": 64.0,
           "overflow_tolerance": 0.5}  # fmt: skip


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("scale", [None, 2.0])
def test_dynamic_scale_options_are_refused_with_a_fixed_scale(name, scale):
    fl.amp.GradScaler("dynamic", **{name: DYNAMIC[name]})
    with pytest.raises(fl.errors.PrecisionError, match=f"{name}=.* is for a dynamic scale"):
        fl.amp.GradScaler(scale, **{name: DYNAMIC[name]})


@pytest.mark.parametrize("given", [{"init_scale": 2.0**20}, {"init_scale": 0}, {"overflow_tolerance": 2}])
def test_a_dynamic_scale_begins_within_its_limits(given):
    with pytest.raises(fl.errors.PrecisionError, match="invalid limits"):
        fl.amp.GradScaler("dynamic", **given)


SCHEDULES = {
    "gamma": lambda o: fl.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, gamma=0.5),
    "scale_mode": lambda o: fl.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, scale_mode="iterations"),
    "scale_mode=": lambda o: fl.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, mode="exp_range", scale_mode="cycle"),
    "step_size_down": lambda o: fl.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_down=0),
    "T_0": lambda o: fl.optim.lr_scheduler.CosineAnnealingWarmRestartsLR(o, 0.1, 2.5),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_arguments_without_effect_are_refused(name):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(fl.errors.ScheduleError, match=name):
        SCHEDULES[name](optimizer)


def _made():
    return fl.deferred_init(nn.Linear, 4, 3)


ARGUMENTS = {
    "num_threads=0": lambda: fl.materialize_module(_made(), num_threads=0),
    "num_threads='2'": lambda: fl.materialize_module(_made(), num_threads="2"),
    "buffers_only='yes'": lambda: fl.materialize_module(_made(), buffers_only="yes"),
    "check_fn=3": lambda: fl.materialize_module(_made(), check_fn=3),
    "takes a module": lambda: fl.materialize_module(3),
    "pads with numbers": lambda: fl.Pad(value="x"),
    "values=3": lambda: fl.Pad(values=3),
    "multiple_of=True": lambda: fl.Pad(multiple_of=True),
    "enabled=.*False": lambda: fl.amp.autocast(False),
    "float64": lambda: fl.amp.autocast(torch.float64),
    "total_iters": lambda: fl.optim.lr_scheduler.ConstantLR(_adam(), 0.1, total_iters=-1),
    "element 5 of 'betas', which has only 2": lambda: fl.optim.lr_scheduler.ConstantLR(
        _adam(), 0.1, param_group_key=("betas", 5)
    ),
    "log_steps=2.5": lambda: Logging(log_steps=2.5),
    "steps=2.5": lambda: Checkpoint(steps=2.5),
    "best=3": lambda: Checkpoint(best=3),
    'mode="max" has no effect': lambda: Checkpoint(mode="max"),
    "strict='no'": lambda: Checkpoint(strict="no"),
    "autoload_last=0": lambda: Checkpoint(autoload_last=0),
    "validation=3": lambda: TrainingLoop(max_steps=1, validation=3),
    "metrics=3": lambda: ValidationLoop(metrics=3),
    "metric_inputs=3": lambda: ValidationLoop(metric_inputs=3),
    "seed='x'": lambda: Trainer(model=nn.Identity, seed="x"),
    "backend is an object of type int": lambda: Trainer(model=nn.Identity, backend=3),
}


def _adam():
    return torch.optim.Adam([nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("says", ARGUMENTS)
def test_arguments_without_effect_are_refused(says, backend):
    with pytest.raises(fl.errors.FirstlossError, match=says):
        ARGUMENTS[says]()
