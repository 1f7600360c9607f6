"""An example that `clipper demo` starts: scikit-learn models in their own processes under load,
with a live table."""

from clipper_demo.run import DemoOptions, run

__all__ = ["DemoOptions", "run"]
