"""A limit counts while somebody looks, not while the process is stopped."""

import pytest

from greenroom import watchdog
from greenroom.watchdog import Watchdog, wait_until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


@pytest.mark.parametrize("looks_a_second", [1, 10, 1000])
def test_it_expires_once_the_limit_is_over(clock: Clock, looks_a_second: int) -> None:
    dog = Watchdog(20.0)
    started = clock.now
    while not dog.expired():
        clock.now += 1 / looks_a_second
    assert 20.0 <= clock.now - started <= 20.0 + 1.5 / looks_a_second


def test_a_stop_counts_as_an_eighth_of_the_limit_at_most(clock: Clock) -> None:
    dog = Watchdog(20.0)
    for _ in range(6):
        clock.now += 3600
        assert not dog.expired()
    for _ in range(49):
        clock.now += 0.1
        assert not dog.expired()
    clock.now += 3600
    assert dog.expired()


def test_a_limit_of_nothing_is_over_at_once(clock: Clock) -> None:
    assert Watchdog(0.0).expired()


def test_waiting_ends_with_what_it_waits_for_or_with_the_limit(clock: Clock) -> None:
    def later() -> bool:
        clock.now += 0.5
        return clock.now >= until

    until = 109.0
    wait_until(later, 10.0, "it did not come")
    assert clock.now == until
    until = 200.0
    with pytest.raises(TimeoutError, match=r"it did not come within 10 s"):
        wait_until(later, 10.0, "it did not come")
