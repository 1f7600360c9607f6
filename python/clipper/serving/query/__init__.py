"""Queries: resolved, sent to models, decided, combined into answers and counted."""
