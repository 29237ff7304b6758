"""The actors of a launch, the copies under way, and whose turn is next.

The running thread hands its turn over itself: a scheduler would change threads twice a step.
"""

import sys
import threading
from pathlib import Path

_HERE = str(Path(__file__).parent)


class Deadlock(AssertionError):
    pass


class _Stopped(BaseException):
    """Ends an actor's thread; not an Exception, so that no kernel catches it."""


class Actor:
    """`products`, `stores`: operations not waited for."""

    def __init__(self, world, run, program, programs):
        self.world, self.program, self.programs = world, program, programs
        self.ready, self.done, self.speed = lambda: True, False, world.speed()
        self.products, self.stores, self.unseen, self.read = [], [], [], None
        self.turn = _taken_lock()
        self.thread = threading.Thread(target=self._main, args=(run,), daemon=True)
        self.thread.actor = self
        self.thread.start()

    def _main(self, run):
        self.turn.acquire()
        try:
            if not self.world.stopped:
                run()
            assert not self.products and not self.stores, "a partition ends before what it has begun"
            for write in self.unseen:
                write()
            self.done = True
            self.world.go_on()
        except _Stopped:
            self.done = True
        except BaseException as error:
            self.done = True
            self.world.end(error)

    def whereabouts(self):
        frame, lines = sys._current_frames()[self.thread.ident], []
        while frame is not None:
            path = frame.f_code.co_filename
            if not path.startswith(_HERE) and not path.endswith("threading.py"):
                numbers = {name: x for name, x in frame.f_locals.items() if isinstance(x, int)}
                lines.append(f"  program {self.program}, {frame.f_code.co_name}, line {frame.f_lineno}: {numbers}")
            frame = frame.f_back
        return "\n".join(lines)


class Copy:
    def __init__(self, arrive, speed):
        self.arrive, self.speed = arrive, speed


class World:
    def __init__(self, draw, threads):
        self.draw, self.threads = draw, threads
        self.actors, self.copies, self.fenced = [], [], []
        self.named = {}  # arrivals at the barriers that PTX knows by a number, and how often each has opened
        self.ended, self.error, self.stopped = _taken_lock(), None, False

    def add(self, run, program, programs):
        actor = Actor(self, run, program, programs)
        self.actors.append(actor)
        return actor

    def run(self):
        try:
            self.go_on()
            self.ended.acquire()
            if self.error is not None:
                raise self.error
            assert not self.copies, "a program ends before its copies"
            assert not any(arrived for arrived, _ in self.named.values()), "a program ends with arrivals at a barrier"
        finally:
            self.stopped = True
            for actor in self.actors:
                if not actor.done:
                    actor.turn.release()

    def go_on(self, me=None):
        """Draws whose turn is next; returns whether it is mine."""
        while not all(actor.done for actor in self.actors):
            choices = [a for a in self.actors if not a.done and a.ready()] + self.copies
            if not choices:
                raise Deadlock("\n".join(["all wait for ever:", *(a.whereabouts() for a in self.actors if not a.done)]))
            (chosen,) = self.draw.choices(choices, [each.speed for each in choices])
            if isinstance(chosen, Actor):
                if chosen is not me:
                    chosen.turn.release()
                return chosen is me
            self.copies.remove(chosen)
            chosen.arrive()
        self.end()
        return False

    def end(self, error=None):
        if not self.stopped:
            self.error = error
            self.ended.release()

    def speed(self):
        return 10.0 ** self.draw.uniform(-1.5, 1.5)

    def pause(self, ready=lambda: True):
        actor = self.me()
        actor.ready = ready
        if self.go_on(actor):
            return
        actor.turn.acquire()
        if self.stopped:
            raise _Stopped

    @staticmethod
    def me():
        return threading.current_thread().actor


def _taken_lock():
    lock = threading.Lock()
    lock.acquire()
    return lock
