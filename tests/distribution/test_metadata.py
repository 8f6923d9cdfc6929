"""What an index shows of the package."""

import re

import firstloss as fl
from tests.distribution.set_up import ROOT, set_up


def test_the_version_is_written_in_one_place():
    assert fl.__version__ not in (ROOT / "pyproject.toml").read_text()


def test_links_and_pictures_of_the_readme_can_be_absolute(monkeypatch):
    text = (ROOT / "README.md").read_text()
    monkeypatch.delenv("FIRSTLOSS_URL", raising=False)
    assert set_up()["readme"] == text
    monkeypatch.setenv("FIRSTLOSS_URL", "https://example.org/firstloss/blob/main/")
    absolute = set_up()["readme"]
    assert re.findall(r"\]\((?!https://)[^)]*\)", absolute) == []
    assert "(https://example.org/firstloss/blob/main/docs/images/demo.png?raw=true)" in absolute
    assert "(https://example.org/firstloss/blob/main/docs/limits.md)" in absolute
    relative = absolute.replace("https://example.org/firstloss/blob/main/", "").replace("?raw=true", "")
    assert relative == text
