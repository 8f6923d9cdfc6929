"""The timeline's events, and its files."""

import json
import subprocess
import sys
import threading
import time

import pytest

from firstloss import timeline
from firstloss.timeline import Timeline


def test_a_span_lasts_as_long_as_its_block():
    t = Timeline()
    with t.span("trace"):
        time.sleep(0.02)
    (span,) = t.spans
    assert span.name == "trace" and span.track == "main"
    assert 0.02 <= span.seconds < 1.0


def test_a_span_is_recorded_when_its_block_raises():
    t = Timeline()
    with pytest.raises(KeyError), t.span("compile"):
        raise KeyError("no")
    assert [span.name for span in t.spans] == ["compile"]


def test_times_count_from_the_start_of_the_process():
    code = (
        "import time; time.sleep(0.3)\n"
        "from firstloss import timeline\n"
        "assert 0.25 < timeline.current().now() < 20, timeline.current().now()\n"
    )
    if timeline._process_age() is None:
        pytest.skip("this system does not tell when a process started")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_proc_the_axis_starts_at_the_import(monkeypatch):
    monkeypatch.setattr(timeline, "_process_age", lambda: None)
    assert timeline.process_started() == timeline._imported


@pytest.mark.parametrize("stat", [b"", b"1 (a) b", b"1 (x) " + b"0 " * 50, b"1 (x) " + b"99999999999999 " * 50])
def test_implausible_values_in_proc_are_ignored(monkeypatch, tmp_path, stat):
    (tmp_path / "stat").write_bytes(stat)
    opened = open
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: opened(tmp_path / "stat", *a, **k))
    assert timeline._process_age() is None


def test_a_program_name_with_spaces_and_parentheses_is_parsed(monkeypatch, tmp_path):
    fields = ["S"] + ["1"] * 18 + ["200"] + ["0"] * 30
    (tmp_path / "stat").write_text(f"17 (a) b (c) {' '.join(fields)}")
    opened = open
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: opened(tmp_path / "stat", *a, **k))
    monkeypatch.setattr(timeline.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(timeline.time, "clock_gettime", lambda clock: 12.5)
    assert timeline._process_age() == 10.5


def test_overlaps_are_counted_once():
    t = Timeline()
    t.add("materialize", 1.0, 3.0, "a")
    t.add("materialize", 2.0, 4.0, "b")
    t.add("materialize", 2.5, 2.75, "c")
    t.add("materialize", 6.0, 7.0, "a")
    assert t.seconds("materialize") == 4.0
    assert t.seconds("compile") == 0.0


def test_a_span_cannot_end_before_it_starts():
    with pytest.raises(ValueError, match="'trace' would end at 1.0"):
        Timeline().add("trace", 2.0, 1.0)


def test_the_table_lists_phases_in_order():
    t = Timeline()
    t.add("compile", 3.0, 4.0)
    t.add("something else", 2.5, 2.6)
    t.add("materialize", 1.0, 5.0, "materialize-0")
    t.add("import", 0.0, 1.0)
    assert [row.name for row in t.table()] == ["import", "compile", "materialize", "something else"]
    assert [row.begin for row in t.table()] == [0.0, 3.0, 1.0, 2.5]


def test_first_loss_is_the_first_mark_of_that_name():
    t = Timeline()
    assert t.first_loss is None
    t.mark(timeline.FIRST_LOSS, 7.0)
    t.mark(timeline.FIRST_LOSS, 9.0)
    t.mark("other", 1.0)
    assert t.first_loss == 7.0


def test_record_collects_from_all_threads_and_restores_the_previous_timeline():
    former = timeline.current()
    before = len(former.spans)

    def work():
        for _ in range(50):
            with timeline.span("materialize"):
                pass

    with timeline.record() as t:
        assert timeline.current() is t
        threads = [threading.Thread(target=work, name=f"worker-{i}") for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        timeline.mark("done")
    assert timeline.current() is former and len(former.spans) == before
    assert len(t.spans) == 200 and len(t.marks) == 1
    assert {span.track for span in t.spans} == {f"worker-{i}" for i in range(4)}


def test_a_span_stays_with_the_timeline_it_began_in():
    with timeline.record() as outer, timeline.span("trace"), timeline.record() as inner:
        pass
    assert [span.name for span in outer.spans] == ["trace"] and inner.spans == ()


def test_a_timeline_round_trips_through_json():
    t = road()
    again = Timeline.from_dict(json.loads(json.dumps(t.to_dict())))
    assert again.spans == t.spans and again.marks == t.marks and again.table() == t.table()


def test_perfetto_gets_one_process_per_timeline_and_one_row_per_track(tmp_path):
    road().to_perfetto(tmp_path / "t.json", other=eager())
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(1, "Firstloss"), (2, "eager")}
    tracks = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert tracks == {(1, "main"), (1, "background"), (2, "main")}
    (compile_event,) = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["name"] == "compile"]
    assert compile_event["ts"] == 3.0e6 and compile_event["dur"] == 1.5e6
    assert [e["ts"] for e in events if e["ph"] == "i"] == [6.0e6, 14.0e6]


def test_perfetto_spans_of_one_row_nest(tmp_path):
    t = Timeline()
    for start, end in [(0, 4), (1, 2), (2, 4), (3, 6), (5, 7)]:
        t.add(f"{start}-{end}", float(start), float(end), "main")
    t.to_perfetto(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    rows = {}
    for e in events:
        if e["ph"] == "X":
            rows.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert sum(map(len, rows.values())) == 5 and len(rows) == 2
    for spans in rows.values():
        for a in spans:
            for b in spans:
                assert not (a[0] < b[0] < a[1] < b[1]), "spans of one row cross"


def test_the_picture_is_a_png_and_leaves_matplotlib_alone(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    backend = matplotlib.rcParams._get_backend_or_none() if hasattr(matplotlib.rcParams, "_get_backend_or_none") else 0
    road().to_png(tmp_path / "t.png", other=eager())
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["t.png"]
    if backend != 0:
        assert matplotlib.rcParams._get_backend_or_none() == backend


def test_an_empty_timeline_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    Timeline().to_png(tmp_path / "t.png")
    Timeline().to_perfetto(tmp_path / "t.json")
    assert (tmp_path / "t.png").stat().st_size > 0


def test_the_title_says_when_the_first_and_the_last_loss_came():
    from firstloss.timeline_picture import headline

    both = [("Firstloss", road()), ("eager way", eager())]
    assert headline(both) == "First loss: Firstloss 6.0 s, eager way 14.0 s"
    for _, each in both:
        each.mark("loss 2", 15.0)
        each.mark("loss 3", 15.5)
    assert headline(both).endswith("eager way 14.0 s; loss 3: Firstloss 15.5 s, eager way 15.5 s")
    both[0][1].mark("loss 4", 16.0)
    assert headline(both) == "Timeline"


def test_a_picture_shows_a_timeline_up_to_its_last_loss():
    from firstloss.timeline_picture import _shown

    t = road()
    t.add(timeline.REST, 6.0, 12.0)
    assert _shown(t) == 6.0
    t.mark("loss 2", 9.0)
    assert _shown(t) == 9.0
    assert _shown(Timeline()) == 0.0
    own = Timeline()
    own.add("import", 0.0, 2.0, "main")
    own.mark("data is there", 1.0)  # a mark of the user's
    assert _shown(own) == 2.0


def road() -> Timeline:
    t = Timeline()
    t.add("import", 0.0, 2.0, "main")
    t.add("capture", 2.0, 2.1, "main")
    t.add("trace", 2.1, 2.7, "main")
    t.add("lower", 2.7, 3.0, "main")
    t.add("compile", 3.0, 4.5, "main")
    t.add("materialize", 2.1, 5.0, "background")
    t.add("first step", 5.0, 6.0, "main")
    t.mark(timeline.FIRST_LOSS, 6.0)
    return t


def eager() -> Timeline:
    t = Timeline()
    t.add("import", 0.0, 2.0, "main")
    t.add("construct", 2.0, 9.0, "main")
    t.add("move", 9.0, 10.0, "main")
    t.add("trace", 10.0, 10.6, "main")
    t.add("lower", 10.6, 10.9, "main")
    t.add("compile", 10.9, 13.0, "main")
    t.add("first step", 13.0, 14.0, "main")
    t.mark(timeline.FIRST_LOSS, 14.0)
    return t
