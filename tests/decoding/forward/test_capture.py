"""Captures by key, typed outcomes, and the clock of overlapped work."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.forward.capture import Captures, OverlapClock
from dsbd_cli.decoding.forward.outcomes import CannotCapture, OutOfMemory
from tests.interrupting import Late, interrupted, late, limited, points_of, stopped

CPU = torch.device("cpu")


def doubled(inputs):
    return [2 * inputs]


def test_a_key_is_captured_once_and_replayed_with_other_inputs():
    runs = []

    def steps(inputs):
        runs.append(1)
        return doubled(inputs)

    captures = Captures(CPU, OverlapClock())
    for value in (1, 2, 3):
        got = captures.launch("key", torch.full((3,), value), steps).wait()
        assert np.array_equal(got, [2 * value] * 3)
    assert list(captures) == ["key"]
    first = captures["key"].outputs[0].data_ptr()
    assert captures.run("key", torch.ones(3, dtype=torch.long), steps)[0].data_ptr() == first


def test_what_came_back_is_the_callers_own():
    captures = Captures(CPU, OverlapClock(), turns=2)
    first = captures.launch("key", torch.ones(2), doubled)
    second = captures.launch("key", 3 * torch.ones(2), doubled)
    one = first.wait()
    third = captures.launch("key", 5 * torch.ones(2), doubled)
    assert one.tolist() == [2, 2]
    assert second.wait().tolist() == [6, 6]
    assert third.wait().tolist() == [10, 10]


def test_buffers_that_move_make_captures_invalid():
    captures = Captures(CPU, OverlapClock())
    captures.valid_for((1, 2))
    captures.run("key", torch.ones(2), doubled)
    captures.valid_for((1, 2))
    assert "key" in captures
    captures.valid_for((1, 3))
    assert "key" not in captures


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize(
    ("raised", "typed"),
    [
        (RuntimeError("operation not permitted when stream is capturing\nmore"), CannotCapture),
        (ValueError("a compiler's own"), CannotCapture),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
    ],
)
def test_errors_get_a_type_where_they_happen(raised, typed, replayed):
    clock = OverlapClock()
    captures = Captures(CPU, clock)
    captures.run("other", torch.ones(2), doubled)
    broken = [not replayed]

    def steps(inputs):
        if broken[0]:
            raise raised
        return doubled(inputs)

    if replayed:
        captures.launch("key", torch.ones(2), steps).wait()
        broken[0] = True
    with pytest.raises(typed) as caught:
        captures.launch("key", torch.ones(2), steps)
    assert str(caught.value) == str(raised).splitlines()[0]
    assert clock.overlap(1.0) == 0  # nothing is in flight of it
    # Short of memory, captures are let go; else the others stay.
    assert list(captures) == ([] if typed is OutOfMemory else ["other", "key"] if replayed else ["other"])


def test_what_the_device_does_meanwhile_counts_once():
    clock = OverlapClock()
    assert clock.overlap(1.0) == 0
    clock.launched()
    clock.ended(0.5)
    assert clock.overlap(1.0) == 0  # nothing in flight
    clock.launched()
    assert clock.overlap(0.2) == pytest.approx(0.2)
    clock.launched()  # one more behind it: the first is still the one at work
    assert clock.overlap(1.0) == pytest.approx(0.3)
    assert clock.overlap(1.0) == 0
    clock.ended(None)  # its time is not known; the next one is at work
    assert clock.overlap(0.1) == pytest.approx(0.1)
    clock.ended(None)
    assert clock.overlap(1.0) == 0
    clock.launched()
    clock.idle()
    assert clock.overlap(1.0) == 0
    clock.launched()
    assert clock.overlap(0.1) == pytest.approx(0.1)


class Limit:
    """What a library of time limits may have as its handler."""

    def __call__(self, number, frame):
        raise Late

    handle = __call__


@pytest.mark.parametrize("handler", [late, Limit(), Limit().handle, partial(late), lambda *_: late(*_)])
def test_what_a_signals_handler_raises_says_nothing_of_the_steps(handler):
    """It goes out as it is, and the same steps are captured later."""
    captures, late_now = Captures(CPU, OverlapClock()), [True, True]

    def steps(inputs):
        if late_now:
            late_now.pop()
            send()
        return doubled(inputs)

    with limited(handler) as send:
        for runs in (captures.run, captures.launch):
            with pytest.raises(Late):
                runs("key", torch.ones(2), steps)
            assert "key" not in captures
    assert captures.launch("key", torch.ones(2), steps).wait().tolist() == [2, 2]


def test_an_error_of_the_steps_is_theirs_whoever_handles_signals():
    """An enum's constructor stands in its traceback, as code that a handler's kind has too."""
    for steps in (lambda inputs: signal.Signals(-5), lambda inputs: late(0, None)):
        with pytest.raises(CannotCapture):
            Captures(CPU, OverlapClock()).run("key", torch.ones(2), steps)


@pytest.mark.parametrize("how", ["ctrl-c", "time limit"])
def test_an_interruption_leaves_no_stream_capturing(monkeypatch, how):
    """On a device that knows what it would refuse: a capture within one, and the end of none."""
    capturing = []

    class Graph:
        def capture_begin(self, **_):
            assert not capturing
            capturing.append(self)

        def capture_end(self):
            assert capturing == [self]
            capturing.clear()

        def replay(self):
            assert not capturing

    class Stream:
        def __init__(self, *_):
            self.wait_stream = lambda other: None

    fakes = {
        "CUDAGraph": Graph, "Stream": Stream, "current_stream": Stream, "stream": lambda _: nullcontext(),
        "graph_pool_handle": object, "is_current_stream_capturing": lambda: bool(capturing),
        "synchronize": lambda _: capturing and pytest.fail("refused while a stream is capturing"),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    captures = Captures(torch.device("cuda"), OverlapClock())

    def steps():
        captures.break_graph()
        return doubled(torch.ones(2))

    points = points_of(lambda: captures._captured(steps))
    assert len(points) > 20
    with limited() as late_now:
        for number, point in enumerate(points):
            stop = stopped if how == "ctrl-c" else late_now
            interrupted(lambda: captures._captured(steps), point, stop)
            if number % 2:
                captures.release()
            captures._captured(steps)
