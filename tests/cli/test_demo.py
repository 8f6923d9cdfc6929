"""The demo end to end with its tiny model, and the files it leaves if it fails."""

import json
import os

import pytest
import torch

from firstloss.cli import demo, main

pytest.importorskip("transformers")

from firstloss.cli import demo_job


def test_the_text_is_the_standard_library_in_order():
    text = demo_job.standard_library(limit=100_000)
    assert len(text) == 100_000 and b"import" in text
    with open(os.path.join(os.path.dirname(os.__file__), "__future__.py"), "rb") as file:
        assert text.startswith(file.read())


def test_a_python_without_its_sources_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_job.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="this Python installation has none"):
        demo_job.standard_library()


def test_batches_are_reproducible_and_leave_the_generator_alone():
    text = bytes(range(256)) * 8
    before = torch.get_rng_state()
    a, b = (demo_job.make_batches(text, steps=3, size=2, length=16) for _ in range(2))
    assert torch.equal(torch.stack(a), torch.stack(b)) and torch.equal(before, torch.get_rng_state())
    assert a[0].shape == (2, 16) and a[0].dtype == torch.int64
    assert not torch.equal(a[0], a[1])
    assert (a[0].diff(dim=1) % 256 == 1).all()  # targets are the inputs shifted by one: the text is increasing bytes


def test_the_plain_loop_learns():
    text = demo_job.standard_library(limit=100_000)
    config = demo_job.LlamaConfig(vocab_size=256, **demo_job.SIZES["tiny"])
    losses = list(demo_job.train_plainly(config, demo_job.make_batches(text, steps=8, size=2, length=64)))
    assert len(losses) == 8 and losses[-1] < losses[0]


def test_the_demo_runs_end_to_end(tmp_path, capfd):
    out = tmp_path / "new" / "demo"
    assert main(["demo", "--size", "tiny", "--steps", "3", "--out", str(out), "--json"]) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert {len(losses) for losses in result["losses"].values()} == {3}
    assert result["max_relative_difference"] < demo.TOLERANCE and result["first_loss_is_the_same"]
    assert {"import", "capture", "trace", "lower", "compile", "materialize", "first step"} <= result["phases"][
        "firstloss"
    ].keys()
    assert result["ratio"] > 0 and result["without_import"]["firstloss"] < result["time_to_first_loss"]["firstloss"]
    for moments in result["moments"].values():
        assert list(moments) == ["first loss", "first update", "loss 3"]
        assert moments["first loss"] < min(moments["first update"], moments["loss 3"])
    assert sorted(path.name for path in out.iterdir()) == ["timeline.json", "timeline.png"]
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "timeline.json").read_text())["traceEvents"]
    assert "step   3/3" in captured.err


@pytest.fixture
def fake_jobs(monkeypatch):
    """Replace the processes by scripted jobs; returns the losses that they report, which tests may change."""
    losses = {way: [5.0, 4.0] for way in demo.TITLES}

    def job(way, args, scratch):
        if way == "warm":
            return
        reported = losses[way]
        if isinstance(reported, Exception):
            raise reported
        yield from ({"loss": loss} for loss in reported)
        spans = [{"name": "import", "track": "main", "start": 0.0, "end": 1.0}]
        marks = [{"name": "first loss", "at": 3.0}, {"name": "loss 2", "at": 4.0 if way == "firstloss" else 6.0}]
        yield {"timeline": {"spans": spans, "marks": marks}}

    monkeypatch.setattr(demo, "_job", job)
    return losses


def test_the_tables_are_printed(fake_jobs, tmp_path, capsys):
    assert main(["demo", "--steps", "2", "--out", str(tmp_path / "demo")]) == 0
    text = capsys.readouterr().out
    assert "step   2/2  loss 4.0000" in text and "time to first loss" in text and "timeline.png" in text
    assert "time to 2nd loss" in text
    assert "Plain PyTorch takes 1.00 times as long to its first loss, 1.50 times as long to its first update" in text


@pytest.mark.parametrize("number, name", [(1, "1st"), (2, "2nd"), (3, "3rd"), (8, "8th"), (11, "11th"), (22, "22nd")])
def test_losses_are_counted_as_in_english(number, name):
    assert demo._ordinal(f"loss {number}") == f"{name} loss"


def test_the_processes_have_the_environment_of_the_user(monkeypatch, tmp_path):
    """No setting of malloc, which on some machines makes plain PyTorch slower."""
    started = []
    monkeypatch.setattr(demo.subprocess, "Popen", lambda command, **options: started.append(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(demo._job("pytorch", type("Args", (), {"size": "tiny", "steps": 1}), str(tmp_path)))
    assert "env" not in started[0]


def test_losses_that_differ_are_an_error(fake_jobs, tmp_path, capsys):
    fake_jobs["pytorch"] = [5.0, 4.001]
    assert main(["demo", "--steps", "2", "--out", str(tmp_path / "demo")]) == 1
    assert "the losses of Firstloss and plain PyTorch differ by 2.5e-04, more than 1e-04" in capsys.readouterr().err


def test_a_loss_that_is_nan_is_an_error(fake_jobs, tmp_path, capsys):
    fake_jobs["firstloss"] = [5.0, float("nan")]
    assert main(["demo", "--steps", "2", "--out", str(tmp_path / "demo")]) == 1


def test_a_job_that_fails_leaves_nothing_behind(fake_jobs, tmp_path, capsys):
    fake_jobs["pytorch"] = RuntimeError("boom")
    assert main(["demo", "--steps", "2", "--out", str(tmp_path / "a" / "b")]) == 1
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.count("\n") == 1


def test_an_existing_folder_is_kept(fake_jobs, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    fake_jobs["pytorch"] = RuntimeError("boom")
    assert main(["demo", "--steps", "2", "--out", str(tmp_path / "mine")]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_out_folder_that_cannot_be_created_is_an_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "demo")]) == 1
    assert "file" in capsys.readouterr().err


def test_a_process_that_dies_is_reported_with_its_last_output(tmp_path, monkeypatch):
    class Args:
        size, steps = "tiny", 1

    monkeypatch.setattr(demo.sys, "executable", "/bin/false")
    with pytest.raises(demo.FirstlossError, match="job 'eager' ended with status 1: no output"):
        list(demo._job("eager", Args, str(tmp_path)))
