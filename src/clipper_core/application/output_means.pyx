"""Running means of what each model predicts."""
cimport cython
from libc.math cimport isfinite

import numpy as np

cdef enum:
    MEMORY = 10000              # predictions; older ones fade, so that the mean follows a model
                                # that is fed other inputs
    ELEMENTS_MAX = 4096         # of an array that is averaged


@cython.final
cdef class OutputMean:
    """The running mean of one model's outputs. Threads: any, with the GIL."""

    cdef void add_number(self, double output) noexcept:
        if self.array is not None:
            self.array = None
            self.n = 0
        if self.n == 0:
            self.number = 0.0
        self.n = min(self.n + 1, <u32> MEMORY)
        self.number = self.number * ((self.n - 1.0) / self.n) + output / self.n


@cython.final
cdef class OutputMeans:
    """The running mean of each model's outputs. Threads: any."""

    def __init__(self):
        self.by_model = {}

    cdef OutputMean mean_of(self, object model):
        """Return the mean of a model, made at first use."""
        found = self.by_model.get(model)
        if found is None:
            found = self.by_model.setdefault(model, OutputMean.__new__(OutputMean))
        return found

    def add(self, model, output):
        """Add an output to the mean of a model. Only finite numbers and arrays of them are
        averaged."""
        cdef OutputMean mean
        if isinstance(output, np.ndarray):
            if output.dtype.kind not in "biuf" or output.size > ELEMENTS_MAX:
                return
            if output.dtype.kind == "f" and not np.isfinite(output).all():
                return
            mean = self.mean_of(model)
            if mean.array is None or mean.array.shape != output.shape:
                mean.array = np.zeros(output.shape)
                mean.n = 0
            mean.n = min(mean.n + 1, <u32> MEMORY)
            mean.array = mean.array * ((mean.n - 1.0) / mean.n) + output / mean.n
        elif isinstance(output, (float, np.floating)) and isfinite(output):
            self.mean_of(model).add_number(output)

    def of(self, model):
        """Return the mean of a model; None when nothing is known."""
        cdef OutputMean mean = self.by_model.get(model)
        if mean is None or mean.n == 0:
            return None
        return mean.number if mean.array is None else mean.array

    def keep(self, models):
        """Forget models that are not among these."""
        self.by_model = {model: mean for model, mean in list(self.by_model.items())
                         if model in models}
