"""Metrics against torchmetrics and scikit-learn, eager and accumulated on the device by traced steps.

They agree to 1e-6: float32 sums in another order.
"""

import math

import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics

import firstloss as fl
from firstloss.errors import MetricError

CLASSES = 5
BATCHES = 4


def batches(seed=0):
    torch.manual_seed(seed)
    return [
        (
            torch.randint(CLASSES - 1, (3, 7)),  # the last class is in no label
            torch.randint(CLASSES, (3, 7)),
            torch.rand(3, 7) * (torch.rand(3, 7) > 0.3),
        )
        for _ in range(BATCHES)
    ]


def joined():
    return [torch.cat([batch[i].flatten() for batch in batches()]).numpy() for i in range(3)]


LABELS, PREDICTIONS, WEIGHTS = joined()
ALL = list(range(CLASSES))


def iou(ignored=(), weights=None):
    matrix = sklearn.metrics.confusion_matrix(LABELS, PREDICTIONS, labels=ALL, sample_weight=weights)
    kept = [c for c in ALL if c not in ignored]
    return np.mean([matrix[c, c] / (matrix[c].sum() + matrix[:, c].sum() - matrix[c, c]) for c in kept])


# (the metric, how it is updated, the number)
CASES = {
    "accuracy": (
        lambda: fl.metrics.AccuracyMetric("accuracy"),
        lambda m, y, p, w: m(labels=y, predictions=p),
        lambda: sklearn.metrics.accuracy_score(LABELS, PREDICTIONS),
    ),
    "accuracy, weighted": (
        lambda: fl.metrics.AccuracyMetric("accuracy"),
        lambda m, y, p, w: m(labels=y, predictions=p, weights=w),
        lambda: ((LABELS == PREDICTIONS) * WEIGHTS).sum() / (WEIGHTS > 0).sum(),
    ),
    "mean": (
        lambda: fl.metrics.MeanMetric("mean"),
        lambda m, y, p, w: m(y.float(), w),
        lambda: np.average(LABELS, weights=WEIGHTS),
    ),
    "perplexity": (
        lambda: fl.metrics.PerplexityMetric("perplexity"),
        lambda m, y, p, w: m(labels=y, loss=w.sum()),
        lambda: math.exp(WEIGHTS.sum() / len(LABELS)),
    ),
    "per class": (
        lambda: fl.metrics.MeanPerClassAccuracyMetric(CLASSES),
        lambda m, y, p, w: m(labels=y, predictions=p),
        lambda: sklearn.metrics.balanced_accuracy_score(LABELS, PREDICTIONS) * (CLASSES - 1) / CLASSES,
    ),
    "F1, micro": (
        lambda: fl.metrics.FBetaScoreMetric(CLASSES),
        lambda m, y, p, w: m(labels=y, predictions=p),
        lambda: sklearn.metrics.f1_score(LABELS, PREDICTIONS, average="micro"),
    ),
    "F2, macro": (
        lambda: fl.metrics.FBetaScoreMetric(CLASSES, beta=2.0, average_type="macro"),
        lambda m, y, p, w: m(labels=y, predictions=p),
        lambda: sklearn.metrics.fbeta_score(
            LABELS, PREDICTIONS, beta=2.0, labels=ALL, average="macro", zero_division=0
        ),
    ),
    "F1, without classes": (
        lambda: fl.metrics.FBetaScoreMetric(CLASSES, ignore_labels=[0, 3]),
        lambda m, y, p, w: m(labels=y, predictions=p),
        lambda: sklearn.metrics.f1_score(LABELS, PREDICTIONS, labels=[1, 2, 4], average="micro"),
    ),
    "mean IoU": (
        lambda: fl.metrics.MeanIOUMetric(CLASSES),
        lambda m, y, p, w: m(labels=y, predictions=p),
        lambda: sklearn.metrics.jaccard_score(LABELS, PREDICTIONS, labels=ALL, average="macro"),
    ),
    "mean IoU, weighted": (
        lambda: fl.metrics.MeanIOUMetric(CLASSES, ignore_classes=[1]),
        lambda m, y, p, w: m(labels=y, predictions=p, weights=w),
        lambda: iou([1], WEIGHTS),
    ),
    "Dice": (
        lambda: fl.metrics.DiceCoefficientMetric(CLASSES),
        lambda m, y, p, w: m(labels=y, predictions=p),
        lambda: sklearn.metrics.f1_score(LABELS, PREDICTIONS, labels=ALL, average="macro", zero_division=0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_eager_metrics_match_their_reference(case):
    make, call, expected = CASES[case]
    metric = make()
    for batch in batches():
        last = call(metric, *batch)
    # float32 against the references' float64. Measured: 8e-8.
    assert float(metric) == float(last) == pytest.approx(expected(), rel=1e-6)
    metric.reset()
    with pytest.raises(MetricError, match="has not been updated"):
        metric.compute()


@pytest.mark.parametrize("part_of_a_model", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_traced_metrics_match_their_reference(case, part_of_a_model, backend, traced):
    make, call, expected = CASES[case]
    metric = make()
    if part_of_a_model:
        model = torch.nn.ModuleDict({"metric": metric})
        fl.compile(model, backend)
        assert not model.state_dict()

    @fl.trace
    def step(y, p, w):
        return call(metric, y, p, w)

    for _ in range(2):
        for batch in batches():
            last = step(*batch)
        assert float(last) == pytest.approx(expected(), rel=1e-6)  # by XLA
        assert float(metric) == pytest.approx(expected(), rel=1e-6)  # by PyTorch
        assert metric.num_updates == BATCHES
        metric.reset()
    # Once, and once more for verification: num_updates and the state must not cause retracing.
    assert len(traced) <= 3


THEIRS = {
    "accuracy": lambda: torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="micro", validate_args=False),
    "F1, binary": lambda: torchmetrics.F1Score("binary", validate_args=False),
    "mean": lambda: torchmetrics.MeanMetric(nan_strategy="disable"),
    "sum": lambda: torchmetrics.SumMetric(nan_strategy="disable"),
    "MSE": lambda: torchmetrics.MeanSquaredError(),
    "largest": lambda: torchmetrics.MaxMetric(nan_strategy="disable"),
}


@pytest.mark.parametrize("name", THEIRS)
def test_torchmetrics_work_in_a_step(name, backend):
    """Updated in a traced step, computed outside it: the same as eager."""
    eager, metric = THEIRS[name](), THEIRS[name]()

    def add(metric, y, p):
        if name in ("mean", "sum", "largest"):
            metric.update(p.float())
        elif name == "MSE":
            metric.update(p.float(), y.float())
        elif "binary" in name:
            metric.update(p // 3, y // 3)
        else:
            metric.update(p, y)

    step = fl.trace(lambda y, p: add(metric, y, p))
    for _ in range(2):
        for y, p, _ in batches():
            step(y, p)
            add(eager, y, p)
        assert torch.equal(metric.compute(), eager.compute())  # quotients of counts
        metric.reset(), eager.reset()


def test_torchmetrics_with_data_dependent_sizes_are_refused(backend):
    """Metrics that count with torch.bincount, whose size depends on values, raise an error whose suggestion works."""
    metric = torchmetrics.JaccardIndex("multiclass", num_classes=CLASSES, validate_args=False)
    y, p, _ = batches()[0]
    with pytest.raises(fl.errors.ValueReadError, match="bincount"):
        fl.trace(lambda y, p: metric.update(p, y), reads="refuse")(y, p)


# -- Firstloss's metrics against others', on random numbers --


@pytest.mark.parametrize("seed", range(5))
def test_metrics_match_torchmetrics(seed):
    actual = {
        "accuracy": fl.metrics.AccuracyMetric("a"),
        "F1": fl.metrics.FBetaScoreMetric(CLASSES, average_type="macro"),
    }
    kind = {"task": "multiclass", "num_classes": CLASSES}
    expected = {"accuracy": THEIRS["accuracy"](), "F1": torchmetrics.F1Score(**kind, average="macro")}
    for y, p, _ in batches(seed):
        y = torch.where(torch.rand(y.shape) < 0.1, CLASSES - 1, y)  # torchmetrics excludes absent classes from the mean
        for name in actual:
            actual[name].update(labels=y, predictions=p)
            expected[name].update(p, y)
    for name in actual:
        # float32 means of a few quotients, in another order. Measured: 9e-8.
        assert float(actual[name]) == pytest.approx(float(expected[name].compute()), rel=1e-6)


def test_invalid_labels_are_an_error():
    metric = fl.metrics.MeanIOUMetric(3)
    with pytest.raises(RuntimeError, match="not one of the classes 0 to 2"):
        metric(labels=torch.tensor([-100, 1]), predictions=torch.tensor([0, 1]))
    metric(labels=torch.tensor([-100, 1]), predictions=torch.tensor([0, 1]), weights=torch.tensor([0.0, 1.0]))
    assert float(metric) == 1


def test_invalid_labels_in_a_step_fail_an_assertion(backend):
    metric = fl.metrics.MeanIOUMetric(3)
    step = fl.trace(lambda y: metric(labels=y, predictions=y))
    step(torch.tensor([0, 1]))
    with pytest.raises(fl.errors.StepAssertionError, match="not one of the classes 0 to 2"):
        step(torch.tensor([0, 3]))


WRONG = {
    "classes": lambda: fl.metrics.MeanIOUMetric(1),
    "ignored": lambda: fl.metrics.DiceCoefficientMetric(3, ignore_classes=[3]),
    "beta": lambda: fl.metrics.FBetaScoreMetric(3, beta=0),
    "average": lambda: fl.metrics.FBetaScoreMetric(3, average_type="weighted"),
    "shapes": lambda: fl.metrics.MeanIOUMetric(3)(torch.zeros(2), torch.zeros(3)),
    "logits": lambda: fl.metrics.AccuracyMetric("a")(torch.zeros(2), torch.zeros(2, 5)),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_arguments_are_refused(case):
    with pytest.raises(MetricError):
        WRONG[case]()


def test_metrics_can_be_found_by_name():
    metrics = [fl.metrics.MeanMetric(f"only here {i // 2}") for i in range(3)]
    registered = {name: metric for name, metric in fl.metrics.get_all_metrics() if "only here" in name}
    assert registered == {"only here 0.0": metrics[0], "only here 0.1": metrics[1], "only here 1": metrics[2]}
    metrics[2].update(3.0)
    computed = fl.metrics.compute_all_metrics()
    assert computed["only here 1"] == 3 and "only here 0.0" not in computed


def test_a_custom_metric_works(backend):
    class Largest(fl.metrics.Metric):
        def reset(self):
            self.register_state("largest", torch.tensor(-1.0), persistent=True)

        def update(self, values):
            self.largest.copy_(torch.maximum(self.largest, values.max()))

        def compute(self):
            return self.largest

    metric = Largest()
    assert metric.name == "Largest" and list(metric.state_dict()) == ["largest"]
    step = fl.trace(lambda x: metric.update(x))
    for x in torch.arange(6.0).reshape(3, 2):
        step(x)
    assert float(metric) == 5 and metric.num_updates == 3
