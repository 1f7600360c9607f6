"""The last lines of a container that was started several times."""

from clipper.manage.deployment import once

TRACE = ["Traceback (most recent call last):", '  File "m.py", line 1', "ImportError: no"]


def test_what_each_start_wrote_is_shown_once() -> None:
    assert once(TRACE * 3) == TRACE
    assert once([*TRACE[1:], *TRACE, *TRACE]) == TRACE  # the first is cut
    assert once([*TRACE, "other", *TRACE]) == [*TRACE, "other", *TRACE]
    assert once([*TRACE, "same", "same"]) == [*TRACE, "same", "same"]
    assert once([]) == []
    assert once(["one"]) == ["one"]
