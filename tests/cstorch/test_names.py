"""The list of names is correct, complete and on its page."""

import json
import types

import pytest

from . import names

ROWS = names.rows()


@pytest.mark.parametrize("package", names.PACKAGES)
def test_each_name_is_listed_once(package):
    keys = [(row["module"], row["name"]) for row in ROWS if row["package"] == package]
    assert len(set(keys)) == len(keys) > 200


def test_every_row_is_complete():
    for row in ROWS:
        assert row["status"] in names.STATUSES, row
        assert (row["status"] == "same") or row["note"], row  # how it differs, or why it is missing
        assert (row["status"] == "not here") == (not row["ours"]), row


@pytest.mark.parametrize("module", sorted({row["module"] for row in ROWS}))
def test_every_row_is_true(module):
    for row in ROWS:
        if row["module"] != module:
            continue
        if row["status"] == "same":
            assert not names.why_not_same(row), (row["name"], names.why_not_same(row))
        elif row["status"] == "differs":
            assert names.resolve(row["ours"]) is not None, row


def test_missing_names_are_missing():
    """A name added later must be listed as present. Classes that only raise an error count as missing."""
    for row in ROWS:
        if row["status"] == "not here" and row["package"] == "cerebras.pytorch" and "." not in row["name"]:
            path = ".".join(part for part in ("firstloss.cstorch", row["module"], row["name"]) if part)
            found = names.resolve(path)
            assert found is None or names.only_raises(found) or isinstance(found, types.ModuleType), row


def test_the_list_has_all_names():
    """The list contains all names and signatures that were read from the packages."""
    assert names.digest() == names.SURFACE


def test_the_page_is_up_to_date():
    assert names.PAGE.read_text(encoding="utf-8") == names.page(), "python -m tests.cstorch.names"


def test_the_check_can_fail():
    row = {"ours": "firstloss.cstorch.optim.AdamW", "signature": "(params, lr=0.001)"}
    assert not names.why_not_same(row)
    for wrong in ("(params, lr=0.002)", "(lr, params=0.001)", "(params, rate=0.001)", "(params, lr)"):
        assert names.why_not_same({**row, "signature": wrong})
    assert names.why_not_same({**row, "ours": "firstloss.cstorch.optim.AdamX"})
    assert json.loads(names.DATA.read_text().splitlines()[0])["package"] in names.PACKAGES
