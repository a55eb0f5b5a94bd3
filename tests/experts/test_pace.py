"""What a lane's pace learns."""

import pytest

from greenroom.experts.pace import Pace


def test_it_follows_what_layers_take_for_each_size_of_batch_apart():
    pace = Pace()
    assert pace.ratio(512) == 1
    for _ in range(10):
        pace.observe(512, 0.1, 0.3)
    assert pace.ratio(512) == pytest.approx(3, rel=1e-2)
    assert pace.ratio(700) == pace.ratio(512)
    assert pace.ratio(1) == pace.ratio(4096) == 1


def test_a_wait_that_found_the_lane_done_shows_at_most_that_it_is_faster():
    pace = Pace()
    pace.observe(8, 0.1, 0.4, exact=False)
    assert pace.ratio(8) == 1
    pace.observe(8, 0.1, 0.05, exact=False)
    assert pace.ratio(8) < 1


def test_one_bad_layer_is_bounded_and_an_unused_lane_is_tried_again():
    pace = Pace()
    pace.observe(8, 1e-3, 1e6)
    worst = pace.ratio(8)
    assert worst < 100
    for _ in range(200):
        pace.observe(8, 0, 0)
    assert 1 <= pace.ratio(8) < 1.1
