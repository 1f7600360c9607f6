"""Optimizers: sgd, momentum, nesterov, adagrad, adam, amsgrad, ftrl, adamw, rmsprop, lion,
rowwise_adagrad; for dense variables here, for rows in `embedding`. Initializers: zeros, constant,
uniform, normal, truncated_normal, glorot."""
from libc.math cimport INFINITY, isfinite, pow, sqrt

cimport numpy as cnp

import numpy as np

from clipper_core.runtime.machine cimport i64, u32, u64
from clipper_core.runtime.status cimport BAD_INPUT, raise_for

from clipper_core.runtime.dtype import given_type

cnp.import_array()

_CLIPS = {"clip_value": INFINITY, "clip_norm": INFINITY}
_SETTINGS = {
    "sgd": {"rate": 0.01, "l2": 0.0, **_CLIPS},
    "momentum": {"rate": 0.01, "momentum": 0.9, "l2": 0.0, **_CLIPS},
    "nesterov": {"rate": 0.01, "momentum": 0.9, "l2": 0.0, **_CLIPS},
    "adagrad": {"rate": 0.01, "start": 0.0, "eps": 1e-10, "l2": 0.0, **_CLIPS},
    "adam": {"rate": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "l2": 0.0, **_CLIPS},
    "amsgrad": {"rate": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "l2": 0.0, **_CLIPS},
    "ftrl": {"rate": 0.1, "beta": 1.0, "l1": 0.0, "l2": 0.0, "start": 0.0, **_CLIPS},
    "adamw": {"rate": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.01, "l2": 0.0,
              **_CLIPS},
    "rmsprop": {"rate": 0.01, "alpha": 0.99, "eps": 1e-8, "l2": 0.0, **_CLIPS},
    "lion": {"rate": 0.0001, "beta1": 0.9, "beta2": 0.99, "decay": 0.0, "l2": 0.0, **_CLIPS},
    "rowwise_adagrad": {"rate": 0.01, "start": 0.0, "eps": 1e-10, "l2": 0.0, **_CLIPS},
}
_SLOTS = {
    "sgd": (), "momentum": ("velocity",), "nesterov": ("velocity",), "adagrad": ("squares",),
    "adam": ("mean", "squares"),
    "amsgrad": ("mean", "squares", "largest"), "ftrl": ("squares", "linear"),
    "adamw": ("mean", "squares"), "rmsprop": ("squares",), "lion": ("mean",),
    "rowwise_adagrad": ("squares",),
}
_ROWWISE = "rowwise_adagrad"    # its state is one float a row
cdef double LEAST = 1.17549435e-38, LARGEST = 3.4028234e38     # normal floats
cdef float BELOW_ONE = 0.99999994

_POSITIVE = ("rate", "clip_value", "clip_norm")   # the others may be zero
_BELOW_ONE = ("momentum", "beta1", "beta2", "alpha")


cdef Stride stride_of(const Rule* rule, u64 t, double scale) noexcept nogil:
    cdef Stride step
    step.rate = <float> min(max(rule.rate * scale, LEAST), LARGEST)
    step.first = step.second = step.gradient = 1.0
    if rule.slots >= 2 and rule.beta2 > 0.0:
        step.first = <float> (1.0 / (1.0 - pow(rule.beta1, <double> t)))
        step.second = <float> (1.0 / sqrt(1.0 - pow(rule.beta2, <double> t)))
    return step


cdef void start_slots(const Rule* rule, float* slots, u64 n) noexcept nogil:
    cdef u64 i
    for i in range(state_floats(rule[0], n)):
        slots[i] = rule.start if i < n else 0.0


cdef class Optimizer:
    """Immutable: a rule and its settings, as `Optimizer("adagrad", rate=0.05)`. Threads: any.

    Names and settings, with their defaults: `Optimizer.SETTINGS`. Rates above 0; momentum, beta1,
    beta2, alpha in [0, 1); decay takes decay * rate * w from each weight; clip_value bounds each
    element of a gradient, clip_norm the Euclidean norm of a row's gradient (of a whole dense
    variable's); l2 adds l2 * w to the gradient (in ftrl: its own l2). `start` is what the sum of
    squares begins at. Errors: StatusError (BAD_INPUT) for an unknown name or setting, or a value
    out of range.
    """

    SETTINGS = _SETTINGS
    SLOTS = _SLOTS

    def __cinit__(self, str name not None, **settings):
        if name not in _SETTINGS:
            raise_for(BAD_INPUT, f"no optimizer {name!r}: {', '.join(_SETTINGS)}")
        known = _SETTINGS[name]
        for key, value in settings.items():
            if key not in known:
                raise_for(BAD_INPUT, f"{name} has no setting {key!r}: {', '.join(known)}")
            if not _in_range(key, value):
                raise_for(BAD_INPUT, f"{name}: {key} = {value!r} is out of its range")
        self.name = name
        self.settings = {key: float(settings.get(key, default)) for key, default in known.items()}
        self.rule.kind = list(_SETTINGS).index(name)
        self.rule.slots = 0 if name == _ROWWISE else len(_SLOTS[name])
        self.rule.row_slots = 1 if name == _ROWWISE else 0
        get = self.settings.get
        self.rule.rate, self.rule.momentum = get("rate"), get("momentum", 0.0)
        self.rule.beta1 = min(<float> get("beta1", 0.0), BELOW_ONE)
        self.rule.beta2 = min(<float> get("beta2", get("alpha", 0.0)), BELOW_ONE)
        self.rule.decay = get("decay", 0.0)
        self.rule.eps = max(<float> get("eps", 0.0), <float> LEAST)   # nothing is divided by zero
        self.rule.l1, self.rule.l2, self.rule.beta = get("l1", 0.0), get("l2"), get("beta", 0.0)
        self.rule.start, self.rule.clip_value, self.rule.clip_norm = get("start",
                0.0), get("clip_value"), get("clip_norm")

    def __repr__(self):
        plain = _SETTINGS[self.name]
        changed = [f"{k}={v:g}" for k, v in self.settings.items() if v != plain[k]]
        return f"Optimizer({', '.join([repr(self.name), *changed])})"

    @property
    def slots(self):
        """Names of the state beside each weight, in their order; of rowwise_adagrad, beside each
        row."""
        return _SLOTS[self.name]

    def state(self, cnp.npy_intp n):
        """Return the state of n weights before their first step, f32[slots, n]; f32[1, 1] of
        rowwise_adagrad."""
        cdef cnp.ndarray made = np.empty(self._shape(n), np.float32)
        start_slots(&self.rule, <float*> cnp.PyArray_DATA(made), n)
        return made

    cdef tuple _shape(self, long n):
        if self.rule.row_slots:
            return (1, 1)
        return (self.rule.slots, n)

    def step(self, cnp.ndarray weights not None, cnp.ndarray state not None,
             cnp.ndarray gradient not None, u64 t=1,
             double scale=1.0):
        """Take one step in place: weights f32[n], state f32[slots, n], by gradient f32[n].

        t: which step this is, from 1 (Adam's correction of its bias).  scale: of the rate.
        Errors: StatusError (BAD_INPUT) for other shapes or dtypes, and for a gradient that holds
        NaN or infinity:
            nothing has changed then.
        """
        cdef cnp.npy_intp n = cnp.PyArray_SIZE(weights)
        cdef Stride step
        for array, shape in ((weights, (n,)), (state, self._shape(n)), (gradient, (n,))):
            if ((<cnp.ndarray> array).dtype != np.float32
                    or not cnp.PyArray_IS_C_CONTIGUOUS(array) or array.shape != shape):
                raise_for(BAD_INPUT,
                          f"expected contiguous f32{list(shape)}, got "
                          f"{given_type(array)}")
        if not (t >= 1 and scale > 0.0 and isfinite(scale)):
            raise_for(BAD_INPUT,
                      f"t = {t}, scale = {scale}: a step has a number from 1, and a scale above 0")
        cdef const float* g = <const float*> cnp.PyArray_DATA(gradient)
        cdef float* w = <float*> cnp.PyArray_DATA(weights)
        cdef float* slots = <float*> cnp.PyArray_DATA(state)
        cdef bint sound
        with nogil:
            sound = all_finite(g, n)
            if sound:
                step = stride_of(&self.rule, t, scale)
                optimizer_step(self.rule, step, w, slots, n, g, n)
        if not sound:
            raise_for(BAD_INPUT, "the gradient holds NaN or infinity")


def _in_range(key, value):
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0.0:
        return False
    if key in _BELOW_ONE:
        return value < 1.0
    return (key not in _POSITIVE or value > 0.0) and (isfinite(value) or key in _CLIPS)


# -- initializers
# --------------------------------------------------------------------------------------------------

_INITIALIZERS = {
    "zeros": {},
    "constant": {"value": 0.0},
    "uniform": {"low": -0.05, "high": 0.05},
    "normal": {"mean": 0.0, "std": 0.05},
    "truncated_normal": {"mean": 0.0, "std": 0.05},
    "glorot": {"fan_in": 0.0},
}


cdef class Initializer:
    """Immutable: the first values of rows, as `Initializer("uniform", low=-0.1, high=0.1)`.
    Threads: any.

    Names and settings, with their defaults: `Initializer.SETTINGS`. truncated_normal lies within
    two standard deviations; glorot is uniform within sqrt(6 / (fan_in + dim)), fan_in 0 standing
    for dim. Errors: StatusError (BAD_INPUT) for an unknown name or setting, or a value out of
    range.
    """

    SETTINGS = _INITIALIZERS

    def __cinit__(self, str name not None, **settings):
        if name not in _INITIALIZERS:
            raise_for(BAD_INPUT, f"no initializer {name!r}: {', '.join(_INITIALIZERS)}")
        known = _INITIALIZERS[name]
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
        """Return f32[n, dim]: the first values of the rows of `ids`, in a table of this key."""
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
