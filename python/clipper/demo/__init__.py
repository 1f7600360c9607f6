"""`clipper demo`: scikit-learn models in their own processes under load, with a live table."""

from clipper.demo.run import DemoOptions, run

__all__ = ["DemoOptions", "run"]
