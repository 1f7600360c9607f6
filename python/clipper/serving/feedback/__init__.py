"""Feedback: joined with answers, written to a journal, applied to policy states."""
