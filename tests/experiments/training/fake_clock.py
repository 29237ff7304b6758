from types import SimpleNamespace

from experiments.training import clock, steps


class FakeClock:
    """Stands still except for dry runs, 1000 seconds, and gradients, one."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: self.now))
        for name, seconds in (("dry_run", 1000.0), ("compute_gradients", 1.0)):
            monkeypatch.setattr(steps, name, self.taking(seconds, getattr(steps, name)))

    def taking(self, seconds, function):
        def called(*arguments, **options):
            self.now += seconds
            return function(*arguments, **options)

        return called
