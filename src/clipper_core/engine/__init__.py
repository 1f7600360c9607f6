"""The engine as Python sees it, and its loop."""
