"""Histories of feedback under faults, and what their check finds."""

from bench.system.faults.feedback_history import FeedbackHistory, Reply, Sent


def errors(times: int, *replies: Reply) -> list[str]:
    sent = [Sent(float(i), i + 0.5, reply) for i, reply in enumerate(replies)]
    return FeedbackHistory({7: sent}).errors({7: times} if times else {})


def test_histories_that_cannot_be_are_found() -> None:
    assert not errors(1, "counted", "duplicate")
    assert not errors(1, "lost", "duplicate")
    assert not errors(1, "lost", "unknown"), "it counted before the kill"
    assert not errors(0, "lost", "unknown")
    assert "counts 0 times" in errors(0, "counted")[0]
    assert "counts 0 times" in errors(0, "lost", "duplicate")[0]
    assert "counts 2 times" in errors(2, "lost", "counted")[0]
    assert "counts 1 times" in errors(1, "unknown")[0]
    assert "acknowledged as new" in errors(1, "counted", "counted")[0]
    assert "is the first" in errors(1, "duplicate", "counted")[0]
    assert "nobody has sent it" in FeedbackHistory().errors({1: 1})[0]
