"""`clipper demo`: three scikit-learn models, each in processes of its own, under load, and a table
of what happens."""

from clipper.demo.run import DemoOptions, run

__all__ = ["DemoOptions", "run"]
