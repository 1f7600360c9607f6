"""Initializers: zeros, constant, uniform, normal, truncated_normal, glorot."""
from libc.math cimport isfinite, sqrt

cimport numpy as cnp

import numpy as np

from clipper_core.runtime.machine cimport i64, u32, u64
from clipper_core.runtime.status cimport BAD_INPUT, raise_for

cnp.import_array()

_SETTINGS = {
    "zeros": {},
    "constant": {"value": 0.0},
    "uniform": {"low": -0.05, "high": 0.05},
    "normal": {"mean": 0.0, "std": 0.05},
    "truncated_normal": {"mean": 0.0, "std": 0.05},
    "glorot": {"fan_in": 0.0},
}


cdef class Initializer:
    """Immutable: what rows begin as, as `Initializer("uniform", low=-0.1, high=0.1)`. Threads: any.

    Names and settings, with their defaults: `Initializer.SETTINGS`. truncated_normal lies within
    two standard deviations; glorot is uniform within sqrt(6 / (fan_in + dim)), fan_in 0 standing
    for dim. Errors: StatusError (BAD_INPUT) for an unknown name or setting, or a value out of
    range.
    """

    SETTINGS = _SETTINGS

    def __cinit__(self, str name not None, **settings):
        if name not in _SETTINGS:
            raise_for(BAD_INPUT, f"no initializer {name!r}: {', '.join(_SETTINGS)}")
        known = _SETTINGS[name]
        for key, value in settings.items():
            if key not in known:
                raise_for(BAD_INPUT,
                          f"{name} has no setting {key!r}: {', '.join(known) or 'none at all'}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                raise_for(BAD_INPUT, f"{name}: {key} = {value!r} is no finite number")
        self.name = name
        self.settings = {key: float(settings.get(key, default)) for key, default in known.items()}
        get = self.settings.get
        if get("low", 0.0) > get("high", 0.0) or get("std", 0.0) < 0.0 or get("fan_in", 0.0) < 0.0:
            raise_for(BAD_INPUT,
                      f"{name}: {self.settings}: low is at most high, std and fan_in are at least "
                      f"0")
        self.start.middle, self.start.width = get("value", get("mean", 0.0)), get("std", 0.0)
        self.start.kind = CONSTANT
        if name in ("normal", "truncated_normal"):
            self.start.kind = NORMAL if name == "normal" else TRUNCATED
        elif name in ("uniform", "glorot"):
            self.start.kind = UNIFORM
            self.start.middle, self.start.width = _centre(get("low", 0.0), get("high", 0.0))

    cdef Start of_rows(self, u32 dim) noexcept:
        cdef Start start = self.start
        if self.name == "glorot":
            start.width = <float> sqrt(6.0 / ((self.settings["fan_in"] or dim) + dim))
        return start

    def __repr__(self):
        settings = [f"{key}={value:g}" for key, value in self.settings.items()]
        return f"Initializer({', '.join([repr(self.name), *settings])})"

    def rows(self, u64 key, ids, u32 dim):
        """f32[n, dim]: what the rows of `ids` begin as, in a table of this key."""
        cdef cnp.ndarray wanted = np.ascontiguousarray(ids, np.int64)
        cdef cnp.ndarray made = np.empty((wanted.size, dim), np.float32)
        cdef const i64* each = <const i64*> cnp.PyArray_DATA(wanted)
        cdef float* out = <float*> cnp.PyArray_DATA(made)
        cdef Start start = self.of_rows(dim)
        cdef cnp.npy_intp i, n = cnp.PyArray_SIZE(wanted)
        with nogil:
            for i in range(n):
                start_row(start, key, each[i], out + i * dim, dim)
        return made


def _centre(low, high):
    return (low + high) / 2.0, (high - low) / 2.0
