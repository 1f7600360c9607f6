"""Commands that measure applications, models and policies."""
