"""The wall clock is only used for times that people read."""

from clipper.clock import wall_time_us


def test_the_wall_clock_counts_from_1970() -> None:
    assert wall_time_us() > 1_577_836_800_000_000  # 2020
    assert isinstance(wall_time_us(), int)
