"""Weighted sums, correctly rounded whatever the order and the split; and the overlap ratio."""

import json
import math
import random
import threading

import pytest

from mpidp.training.adapter import BatchResult
from mpidp.training.metrics import sum_results
from mpidp.training.reports import Running, means
from mpidp.training.timing import ExchangeTimer, hidden_time


def test_sum_does_not_depend_on_the_order():
    generator = random.Random(3)
    results = [
        BatchResult(
            generator.randint(0, 9), generator.uniform(-1, 1) * 10 ** generator.randint(-8, 8)
        )
        for _ in range(200)
    ]
    expected = sum_results(results)
    for _ in range(5):
        generator.shuffle(results)
        assert sum_results(results) == expected


def test_names_of_some_ranks_only():
    total = sum_results([BatchResult(), BatchResult(2, 1.5, {"a": 1}), BatchResult(1, 1, {"b": 2})])
    assert total == BatchResult(3, 2.5, {"a": 1, "b": 2})


def test_infinities_and_nan_stay_visible():
    both = [BatchResult(1, math.inf), BatchResult(1, -math.inf)]
    assert math.isnan(sum_results(both).loss)
    assert sum_results([BatchResult(1, math.inf), BatchResult(1, 1.0)]).loss == math.inf


def test_results_add():
    left, right = BatchResult(1, 2, {"a": 3}), BatchResult(4, 5, {"b": 6})
    assert left + right == BatchResult(5, 7, {"a": 3, "b": 6})


def test_means_of_no_samples():
    loss, metrics = means(BatchResult())
    assert math.isnan(loss)
    assert metrics == {}


def test_sums_under_way_survive_a_checkpoint_bit_for_bit():
    running = Running()
    running.add(BatchResult(3, 0.1 + 0.2, {"a": 1 / 3}), applied=True, wire_bytes=7)
    running.add(BatchResult(1, math.nan, {"b": 5e-324}), applied=False, wire_bytes=8)
    back = Running.from_json(json.loads(json.dumps(running.to_json())))
    assert math.isnan(back.total.loss)
    assert (back.total.weight, back.total.metrics) == (4, {"a": 1 / 3, "b": 5e-324})
    assert (back.steps, back.skipped_steps, back.wire_bytes) == (2, 1, 15)


@pytest.mark.parametrize(
    ("running", "blocked", "expected"),
    [
        ([], [], (0, 0)),
        ([(0, 4)], [], (4, 4)),
        ([(0, 4)], [(0, 4)], (0, 4)),
        ([(0, 4), (2, 6)], [(5, 7)], (5, 6)),
        ([(0, 1), (3, 5)], [(0.5, 4), (3.5, 4.5)], (1, 3)),
        ([(2, 3)], [(0, 1), (4, 9)], (1, 1)),
    ],
)
def test_hidden_time(running, blocked, expected):
    assert hidden_time(running, blocked) == expected


class FakeWork:
    """Completes when the test says so, or once the test itself waits for it."""

    def __init__(self):
        self.completed = threading.Event()
        self.when_waited_for = lambda: None

    def wait(self, timeout=None):
        if threading.current_thread() is threading.main_thread():
            self.when_waited_for()
        assert self.completed.wait(30)

    def done(self):
        return self.completed.is_set()


class FakeComm:
    """Collectives whose times the test decides; `now` is the clock."""

    world_size = 2

    def __init__(self):
        self.now = 0.0
        self.works = []

    def all_reduce_async(self, x):
        self.works.append(FakeWork())
        return self.works[-1]

    def all_reduce(self, x):
        self.now += x
        return x


@pytest.fixture
def fake():
    comm = FakeComm()
    timer = ExchangeTimer(comm, clock=lambda: comm.now)
    yield comm, timer
    timer.close()


def complete(timer, work, inner):
    """Until the watching thread has noted it."""
    inner.completed.set()
    for _ in range(3000):
        if work.interval(-1.0)[1] != -1.0:
            return
        threading.Event().wait(0.01)
    pytest.fail("the completion was not noted")


def test_an_exchange_that_ends_in_the_backward_is_hidden(fake):
    comm, timer = fake
    timer.begin_step(1)
    comm.now = 1.0
    work = timer.all_reduce_async(None)
    comm.now = 4.0
    complete(timer, work, comm.works[0])
    comm.now = 9.0  # the backward ends
    work.wait()
    timer.end_step()
    assert timer.take_overlap_ratio() == 1.0
    assert timer.take_overlap_ratio() is None


def test_what_is_waited_for_after_the_backward_is_exposed(fake):
    comm, timer = fake
    timer.begin_step(1)
    comm.now = 1.0
    work = timer.all_reduce_async(None)
    comm.now = 4.0  # the backward ends, and the wait takes until 5

    def pass_time():
        comm.now = 5.0
        comm.works[0].completed.set()

    comm.works[0].when_waited_for = pass_time
    work.wait()
    timer.end_step()
    assert timer.take_overlap_ratio() == pytest.approx(3 / 4)


def test_blocking_collectives_are_exposed(fake):
    comm, timer = fake
    timer.begin_step(1)
    work = timer.all_reduce_async(None)
    comm.now = 3.0
    complete(timer, work, comm.works[0])
    work.wait()
    assert timer.all_reduce(1.0) == 1.0
    timer.end_step()
    assert timer.take_overlap_ratio() == pytest.approx(3 / 4)


def test_only_some_steps_are_measured_and_none_of_a_single_rank(fake):
    comm, timer = fake
    timer.begin_step(0)
    assert timer.all_reduce_async(None) is comm.works[0]
    timer.end_step()
    comm.world_size = 1
    timer.begin_step(1)
    assert timer.all_reduce_async(None) is comm.works[1]
    timer.end_step()
    assert timer.take_overlap_ratio() is None
