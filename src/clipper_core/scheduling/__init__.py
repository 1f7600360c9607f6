"""Decides which rows go to which container and when; has no input or output."""
