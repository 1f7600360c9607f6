"""The starts of a child that ended: the pauses of one, and the distance between several."""

import pytest

from clipper.processes.restarts import NEVER_HELD, RestartPolicy, Restarts, Spacing


def test_restarts_keep_a_distance_and_do_not_wait_for_later_ones() -> None:
    spacing = Spacing()
    assert spacing.next_s(0.0, 600.0, 0.1) == 600.0  # of one that is held
    assert spacing.next_s(1.0, 0.5, 0.1) == 1.5
    assert spacing.next_s(1.0, 0.5, 0.1) == pytest.approx(1.6)
    assert spacing.next_s(1.0, 0.45, 0.1) == pytest.approx(1.7)
    assert spacing.next_s(1.0, 0.2, 0.1) == pytest.approx(1.2)
    assert spacing.next_s(599.0, 1.0, 0.1) == pytest.approx(600.1)


@pytest.mark.parametrize(("share", "pause_s"), [(1.0, 4.0), (0.1, 0.5)])
def test_the_pause_of_a_child_that_served_is_a_share_of_that(share: float, pause_s: float) -> None:
    policy = RestartPolicy(
        backoff_s_min=0.5, exits_max=NEVER_HELD, healthy_s=60.0, served_share=share
    )
    restarts = Restarts(policy)
    for _ in range(3):
        restarts.ended(0.0)
    assert restarts.ended(10.0, ready_s=5.0).pause_s == pause_s


def test_one_that_served_is_never_held_for_kills_also_in_its_start() -> None:
    policy = RestartPolicy(exits_max=3, backoff_s_max=2.0)
    served, never = Restarts(policy), Restarts(policy)
    served.ended(10.0, ready_s=5.0, stopped=True)
    found = [served.ended(10.0 + i, stopped=True) for i in range(8)]
    assert not any(verdict.held for verdict in found)
    assert found[-1].pause_s == 2.0
    held = [bool(never.ended(float(i), stopped=True).held) for i in range(3)]
    assert held == [False, False, True]


def test_where_no_restart_is_allowed_the_first_exit_is_final() -> None:
    verdict = Restarts(RestartPolicy(exits_max=0)).ended(1.0, ready_s=0.0, stopped=True)
    assert verdict.is_final
    assert verdict.held == "it is started again on request only"


def test_an_excused_kill_takes_no_earlier_exit_away() -> None:
    restarts = Restarts(RestartPolicy(exits_max=3, window_s=100.0))
    assert not restarts.ended(1.0).held
    assert not restarts.ended(2.0).held
    assert not restarts.ended(4.0, ready_s=3.0, stopped=True).held
    restarts.excuse()
    assert restarts.ended(5.0).held == "stopped after 3 exits in 4.0 s"
    restarts.excuse()
    assert not restarts.ended(6.0, ready_s=5.5, stopped=True).held
    assert restarts.ended(7.0).held == "stopped after 3 exits in 6.0 s"
