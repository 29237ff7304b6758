from __future__ import annotations

from io import StringIO

from rich.console import Console

from experiments.training import progress_bar
from experiments.training.progress_bar import TrainingBar, counting_bar


def test_slow_training_says_something_every_half_minute(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    written = StringIO()
    with TrainingBar(Console(file=written, width=120), "run", lambda: 0.5) as bar:
        for step in range(5, 130, 5):
            now[0] += 2 if step <= 100 else 7
            bar.show({"kind": "train", "step": step, "loss": 1.0, "tokens_per_s": 10.0})
    said = [int(line.split()[2]) for line in written.getvalue().splitlines()]
    assert said == [75, 100, 125]  # after 30 seconds, at a hundred steps, and after 35 seconds more, not 28


def test_lines_tell_the_time_that_is_left(monkeypatch):
    written, share, now = StringIO(), [0.25], [100.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    with TrainingBar(Console(file=written, width=120), "run", lambda: share[0]) as bar:
        for share[0], now[0] in ((0.25, 140.0), (0.5, 200.0)):
            bar.show({"kind": "train", "step": 100, "loss": 1.0, "images_per_s": 5.0})
    first, second = written.getvalue().splitlines()
    assert first.endswith("5 img/s") and second.endswith("5 img/s  0:03:20 left")


def test_slow_counting_says_something_every_half_minute(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    written = StringIO()
    with counting_bar(Console(file=written, width=120), "Drawing", 10_000) as progress:
        for done in (1000, 2000, 3000):
            now[0] += 20
            progress(done)
    assert written.getvalue() == "Drawing: 2,000 of 10,000\n"
