"""PyTorch's own tests, if there is a checkout of PyTorch; and the code that runs them."""

import os
from pathlib import Path

import pytest
import torch

from . import page
from .__main__ import outcomes
from .worker import apart

FOLDER = os.environ.get("FIRSTLOSS_TORCH_TESTS")

OWN = """
import torch
from torch.testing._internal.common_utils import TestCase, run_tests


class TestOwn(TestCase):
    def test_hook(self):
        fired = []
        model = torch.nn.Linear(3, 2)
        handle = model.register_forward_hook(lambda m, i, o: fired.append(o.shape) or o * 2)
        x = torch.ones(4, 3)
        twice = model(x)
        handle.remove()
        self.assertEqual(twice, model(x) * 2)
        self.assertEqual(len(fired), 1)

    def test_optimizer(self):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.5)

        def closure():
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        self.assertEqual(optimizer.step(closure), torch.tensor(3.0))
        self.assertEqual(weight, torch.zeros(3))

    def test_line_search(self):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.LBFGS([weight])
        optimizer.step(lambda: weight.square().sum())

    def test_wrong(self):
        self.assertEqual(torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape, (3, 3))

    def test_where_it_lives(self):
        model = torch.nn.Linear(3, 2)
        model(torch.ones(4, 3))
        self.assertTrue(type(model.weight) is torch.nn.Parameter)

    def test_read(self):
        self.assertTrue(torch.nn.Linear(3, 2)(torch.ones(4, 3)).isfinite().all().item())

    def test_ends(self):
        import os

        if type(torch.nn.Linear(2, 2)(torch.ones(1, 2))).__name__ == "DeferredTensor":
            os._exit(3)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
        if hasattr(optimizer.param_groups[0]["params"][0], "_storage"):
            os._exit(3)


if __name__ == "__main__":
    run_tests()
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """The verdicts of the tests above, by mode and name."""
    folder = tmp_path_factory.mktemp("clients")
    (folder / "test_own.py").write_text(OWN)
    table = {}
    for way in ("eager", "backend", "steps", "whole"):
        left_out = set() if way == "backend" else {"TestOwn.test_ends"}
        rows = outcomes(folder / "test_own.py", way, "", str(folder), 120, left_out)
        table[way] = {row["test"].partition("test_")[2]: row for row in rows}
    return {way: {name: row["verdict"] for name, row in rows.items()} for way, rows in table.items()}


@pytest.mark.timeout(300)
def test_each_mode_runs_the_tests(verdicts):
    assert verdicts["eager"] == dict.fromkeys(verdicts["eager"], "passed") | {"wrong": "failed"}
    for way in ("backend", "steps", "whole"):
        assert verdicts[way]["hook"] == verdicts[way]["optimizer" if way != "whole" else "hook"] == "passed"
        assert verdicts[way]["wrong"] == "failed"
    assert verdicts["backend"]["line_search"] == verdicts["steps"]["line_search"] == "passed"
    assert verdicts["backend"]["where_it_lives"] == verdicts["steps"]["where_it_lives"] == "failed"
    assert verdicts["backend"]["read"] == verdicts["whole"]["read"] == "passed"
    assert verdicts["backend"]["ends"] == "ended"


def test_results_are_compared_with_eager():
    one = [("step()", [torch.tensor([1.0, 2.0])])]
    assert apart(one, one) is None
    assert "off by 1.0e-02" in apart(one, [("step()", [torch.tensor([1.0, 2.01])])])
    assert "float64" in apart(one, [("step()", [torch.tensor([1.0, 2.0], dtype=torch.float64)])])
    assert "1 calls and steps, and 2" in apart(one, one * 2)


def test_the_page_is_up_to_date(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    kept = Path(page.DOCS / "torch-tests.md").read_text()
    page.write_page()
    assert page.PAGE.read_text() == kept


def test_every_difference_has_a_reason():
    """A difference that even a test's own assertions do not detect is a bug to fix, not a row."""
    rows = page.read_rows().values()
    assert [row["test"] for row in rows for way in page.WAYS if page.verdict(row, way) == "differs"] == []


@pytest.mark.skipif(FOLDER is None, reason="FIRSTLOSS_TORCH_TESTS names no checkout of PyTorch (docs/torch-tests.md)")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", ["nn/test_module_hooks.py", "nn/test_parametrization.py"])
def test_pytorchs_tests_have_their_outcomes(file, tmp_path):
    """As in the rows, in every mode except a slow one."""
    kept = {row["test"]: row for row in page.read_rows().values() if row["file"] == file}
    for way in page.FILES[file]:
        for row in outcomes(Path(FOLDER) / "test" / file, way, "", str(tmp_path), 300, set()):
            if row["test"] in kept and page.verdict(kept[row["test"]], way):
                assert row["verdict"] == page.verdict(kept[row["test"]], way), row
