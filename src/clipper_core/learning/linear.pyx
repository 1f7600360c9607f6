"""Linear models over a query's features, and over the numbers that models predict.

The factor of Cholesky is kept, not the inverse that Sherman and Morrison's formula would update: a
rank-1 update costs the same, d^2, and cannot lose positive definiteness to rounding, however many
observations and however alike the features. Mean and width of one model are two forward
substitutions: with L u = x and L v = b, the mean is u.v and the variance u.u.

Discounting A by g would let the ridge fade with it. It is put back one coordinate an observation,
in turn: a rank-1 update along an axis, by as much as d observations took from it.

A blend learns by weights that begin at the plain mean and leave it as far as the label is explained
better: the ridge pulls them to 1/k, not to 0, with a force in units of what the plain mean leaves
unexplained. A missing output is filled in by the same regression on the outputs that arrived.

Sources: LinUCB, Li, Chu, Langford and Schapire 2010; LinTS, Agrawal and Goyal 2013; discounting,
Russac, Vernade and Cappe 2019; the rank-1 update, Gill, Golub, Murray and Saunders 1974, method C1.
"""
cimport numpy as cnp
from libc.math cimport INFINITY, NAN, cos, fabs, fmax, isfinite, isinf, isnan, log, sqrt

import numpy as np

from clipper_core.learning.bandit cimport _random
from clipper_core.learning.number_votes cimport models_used, numbers_read
from clipper_core.runtime.machine cimport u32, u64, u8
from clipper_core.runtime.status cimport BAD_INPUT, raise_for

cnp.import_array()

cdef double TWO_PI = 6.283185307179586
cdef double TRUST_CONSTANT = 3.0    # number of observations at which the constant of a blend has
                                    # half of its weight


# -- lower triangular matrices, packed by rows
# ----------------------------------------------------------------------------------

cdef inline u32 _row(u32 i) noexcept nogil:
    return i * (i + 1) // 2


cdef void _solve_lower(const double* l, u32 d, const double* b, double* u) noexcept nogil:
    """Solve L u = b."""
    cdef u32 i, j
    cdef double left
    cdef const double* row = l
    for i in range(d):
        left = b[i]
        for j in range(i):
            left -= row[j] * u[j]
        u[i] = left / row[i]
        row += i + 1


cdef void _solve_upper(const double* l, u32 d, double* u) noexcept nogil:
    """Solve L' x = u in place."""
    cdef u32 i, j
    for i in range(d, 0, -1):
        u[i - 1] /= l[_row(i - 1) + i - 1]
        for j in range(i - 1):
            u[j] -= l[_row(i - 1) + j] * u[i - 1]


cdef void _factor(double* a, u32 d, double least) noexcept nogil:
    """Compute the Cholesky factor in place. A pivot below `least`, which only rounding causes,
    becomes `least`."""
    cdef u32 i, j, m
    cdef double left
    for i in range(d):
        for j in range(i + 1):
            left = a[_row(i) + j]
            for m in range(j):
                left -= a[_row(i) + m] * a[_row(j) + m]
            a[_row(i) + j] = sqrt(fmax(left, least)) if i == j else left / a[_row(j) + j]


cdef void _update(double* l, u32 d, double* v, u32 first) noexcept nogil:
    """Update L in place to the factor of L L' + v v'. v is overwritten, and is zero before
    `first`."""
    cdef u32 i, j
    cdef double r, c, s
    for j in range(first, d):
        if v[j] == 0.0:
            continue
        r = sqrt(l[_row(j) + j] * l[_row(j) + j] + v[j] * v[j])
        c = r / l[_row(j) + j]
        s = v[j] / l[_row(j) + j]
        l[_row(j) + j] = r
        for i in range(j + 1, d):
            l[_row(i) + j] = (l[_row(i) + j] + s * v[i]) / c
            v[i] = c * v[i] - s * l[_row(i) + j]


# -- contextual
# --------------------------------------------------------------------------------------------------

cdef u32 context_columns(u32 d) noexcept nogil:
    return _row(d) + d


cdef u32 context_size(cnp.npy_intp columns) noexcept nogil:
    cdef u32 d
    for d in range(1, FEATURES_MAX + 1):
        if context_columns(d) == columns:
            return d
    return 0


cdef cnp.ndarray context_widened(cnp.ndarray rows, u32 d, double ridge):
    cdef cnp.ndarray wide = np.zeros((rows.shape[0], context_columns(d)))
    cdef u32 i
    wide[:, 0], wide[:, _row(d)] = rows[:, 0], rows[:, 1]
    for i in range(1, d):
        wide[:, _row(i) + i] = sqrt(ridge)
    return wide


cdef double _normal(u64* stream) noexcept nogil:
    return sqrt(-2.0 * log(_random(stream))) * cos(TWO_PI * _random(stream))


cdef u32 context_choose(const ContextRule* rule, const double* rows, const u32* places, u32 k,
                        u32 d, const double* x, double uniform) noexcept nogil:
    cdef double[FEATURES_MAX] u
    cdef double[FEATURES_MAX] v
    cdef u64 stream = <u64> (uniform * 9007199254740992.0)
    cdef u32 columns = context_columns(d), i, j, best = 0
    cdef double mean, variance, value, high = -INFINITY
    cdef const double* row
    for i in range(k):
        row = rows + <u64> (i if places == NULL else places[i]) * columns
        _solve_lower(row, d, x, u)
        _solve_lower(row, d, row + _row(d), v)
        mean = variance = 0.0
        for j in range(d):
            mean += u[j] * v[j]
            variance += u[j] * u[j]
        value = mean + rule.width * sqrt(variance) * (_normal(&stream) if rule.sampled else 1.0)
        if value > high:
            high = value
            best = i
    return best


cdef void context_learn(const ContextRule* rule, double* row, u32 d, const double* x, double reward,
                        double weight,
                        u64 turn) noexcept nogil:
    cdef double[FEATURES_MAX] v
    cdef double* b = row + _row(d)
    cdef double root = sqrt(rule.discount)
    cdef u32 i, axis = <u32> (turn % d)
    if rule.discount < 1.0:
        for i in range(_row(d)):
            row[i] *= root
        for i in range(d):
            b[i] *= rule.discount
            v[i] = 0.0
        v[axis] = sqrt((1.0 - rule.discount) * rule.ridge * d)
        _update(row, d, v, axis)
    if isnan(reward):
        return
    root = sqrt(weight)
    for i in range(d):
        b[i] += weight * reward * x[i]
        v[i] = root * x[i]
    _update(row, d, v, 0)


# -- a blend
# --------------------------------------------------------------------------------------------------

cdef inline const double* _stat(const double* rows, u32 k, u32 i) noexcept nogil:
    """Return the statistics of element i: mean, count, then k + 1 sums of products."""
    return rows + i * (k + 3)


cdef double _unexplained(const double* rows, u32 k, const double* w) noexcept nogil:
    """Return the sum of squares around the label that weights w leave."""
    cdef double left = _stat(rows, k, k)[2 + k], pulled
    cdef u32 i, j
    for i in range(k):
        pulled = -2.0 * _stat(rows, k, i)[2 + k]
        for j in range(k):
            pulled += _stat(rows, k, i)[2 + j] * w[j]
        left += w[i] * pulled
    return fmax(left, 0.0)


cdef void _regress(const double* rows, u32 k, double ridge, const u32* on, u32 m, u32 target,
                   double* w) noexcept nogil:
    """Compute the weights w[m] of the variables `on` that explain `target`, drawn to 1/m."""
    cdef double[TRIANGLE_MAX] a
    cdef double[BLENDED_MAX] u
    cdef double even = 1.0 / m, trace = 0.0, left, pull
    cdef u32 i, j
    left = _stat(rows, k, target)[2 + target]   # the error of the plain mean of `on`
    for i in range(m):
        u[i] = _stat(rows, k, on[i])[2 + target]
        left -= 2.0 * even * u[i]
        trace += _stat(rows, k, on[i])[2 + on[i]]
        for j in range(m):
            u[i] -= even * _stat(rows, k, on[i])[2 + on[j]]
            left += even * even * _stat(rows, k, on[i])[2 + on[j]]
            if j <= i:
                a[_row(i) + j] = _stat(rows, k, on[i])[2 + on[j]]
    if not trace > 0.0:
        for i in range(m):
            w[i] = even
        return
    pull = ridge * fmax(left, 0.0) / fmax(_stat(rows, k, k)[1], 1.0) + 1e-9 * trace
    for i in range(m):
        a[_row(i) + i] += pull
    _factor(a, m, 1e-12 * trace)
    _solve_lower(a, m, u, w)
    _solve_upper(a, m, w)
    for i in range(m):
        w[i] += even


cdef double blend_weights(const double* rows, u32 k, double ridge, double* w) noexcept nogil:
    cdef u32[BLENDED_MAX] on
    cdef u32 i
    cdef double count = _stat(rows, k, k)[1], constant = _stat(rows, k, k)[0]
    on[0] = 0
    for i in range(k):
        on[i] = i
    _regress(rows, k, ridge, on, k, k, w)
    for i in range(k):
        constant -= w[i] * _stat(rows, k, i)[0]
    w[k] = constant * count / (count + TRUST_CONSTANT)
    return sqrt(_unexplained(rows, k, w) / fmax(count - k - 1.0,
                                                0.5 * count)) if count > 0.0 else 0.0


cdef void blend_fill(const double* rows, u32 k, double ridge, double* z, u64 n) noexcept nogil:
    """Fill in the missing outputs. All n elements lack the same models: those of the first one."""
    cdef double[BLENDED_MAX] w
    cdef u32[BLENDED_MAX] on
    cdef u32 m = 0, i, j
    cdef u64 e
    cdef double expected
    for i in range(k):
        if not isnan(z[i]):
            on[m] = i
            m += 1
    if m == 0 or m == k:
        return
    for i in range(k):
        if not isnan(z[i]):
            continue
        _regress(rows, k, ridge, on, m, i, w)
        expected = _stat(rows, k, i)[0]
        for j in range(m):
            expected -= w[j] * _stat(rows, k, on[j])[0]
        for e in range(n, 0, -1):       # the first one last, because it shows what is missing
            z[(e - 1) * (k + 1) + i] = expected
            for j in range(m):
                z[(e - 1) * (k + 1) + i] += w[j] * z[(e - 1) * (k + 1) + on[j]]


cdef void blend_learn(double* rows, u32 k, double ridge, double discount, double* z, u64 n,
                      double weight) noexcept nogil:
    """Update the means and the sums of products around them, element by element (West 1979)."""
    cdef double[BLENDED_MAX + 1] away
    cdef u32 i, j
    cdef u64 e
    cdef double before, after, share = weight / n
    cdef double* row
    blend_fill(rows, k, ridge, z, n)
    for e in range(n):
        before = rows[1] * (discount if e == 0 else 1.0)
        after = before + share
        for i in range(k + 1):
            away[i] = z[e * (k + 1) + i] - rows[i * (k + 3)]
        for i in range(k + 1):
            row = rows + i * (k + 3)
            row[0] += share / after * away[i]
            row[1] = after
            for j in range(k + 1):
                row[2 + j] = row[2 + j] * (discount if e == 0
                                           else 1.0) + share * before / after * away[i] * away[j]


# -- for Python
# --------------------------------------------------------------------------------------------------

cdef cnp.ndarray _doubles(object values, str what):
    cdef cnp.ndarray found
    if (isinstance(values, np.ndarray) and cnp.PyArray_TYPE(values) == cnp.NPY_DOUBLE
            and cnp.PyArray_IS_C_CONTIGUOUS(values) and cnp.PyArray_ISBEHAVED_RO(values)):
        return values
    try:
        found = np.ascontiguousarray(values, np.float64)
    except (TypeError, ValueError):
        raise_for(BAD_INPUT, f"{what} must be numbers")
    return found


cdef bint _are_finite(cnp.ndarray values) noexcept:
    cdef const double* value = <double*> cnp.PyArray_DATA(values)
    cdef Py_ssize_t i
    for i in range(cnp.PyArray_SIZE(values)):
        if not isfinite(value[i]):
            return False
    return True


cdef class Context:
    """LinUCB or LinTS with its parameters; it takes rows f64[k, columns(d)] and returns new rows;
    nothing is changed in place. Threads: any. d counts the features, the constant 1 included: 1 to
    33. Features may have any size up to 1e6, and have the same influence when they are about 1.

    sampled: LinTS. width: standard deviations of the bound, or of the sample. discount: factor of
    what was learned, per observation. ridge: number of assumed observations of size 1 along every
    axis with reward 0.
    """

    def __cinit__(self, *, bint sampled, double width, double discount, double ridge):
        if not (width >= 0 and 0 < discount <= 1 and ridge > 0):
            raise_for(BAD_INPUT, "width is at least 0, discount in (0, 1], ridge above 0")
        self.state.sampled = sampled
        self.state.width = width
        self.state.discount = discount
        self.state.ridge = ridge

    @staticmethod
    def columns(u32 d):
        """Return how many numbers a model has in a state of d features."""
        if not 1 <= d <= FEATURES_MAX:
            raise_for(BAD_INPUT,
                      f"{d} features: 1 to {FEATURES_MAX} are possible, the constant included")
        return context_columns(d)

    def fresh(self, u32 d):
        """Return the row of a model without observations."""
        cdef cnp.ndarray row = np.zeros(self.columns(d))
        cdef double* factor = <double*> cnp.PyArray_DATA(row)
        cdef u32 i
        for i in range(d):
            factor[_row(i) + i] = sqrt(self.state.ridge)
        return row

    def widened(self, cnp.ndarray rows, u32 d):
        """Return rows of d features from rows that have the constant only."""
        self.columns(d)
        return context_widened(self._checked(rows, 1), d, self.state.ridge)

    cdef cnp.ndarray _checked(self, cnp.ndarray rows, u32 d):
        if (cnp.PyArray_TYPE(rows) != cnp.NPY_DOUBLE or rows.ndim != 2
            or not cnp.PyArray_IS_C_CONTIGUOUS(rows)
                or rows.shape[0] < 1 or rows.shape[1] != self.columns(d)):
            raise_for(BAD_INPUT, f"rows must be f64[k, {self.columns(d)}] for {d} features")
        return rows

    cdef cnp.ndarray _features(self, object x):
        cdef cnp.ndarray found = _doubles(x, "features")
        if found.ndim != 1 or not _are_finite(found):
            raise_for(BAD_INPUT, "features must be f64[d], finite")
        return found

    def choose(self, cnp.ndarray rows, x, double uniform):
        """Return the model to query. x: f64[d], the constant included; uniform: in [0, 1)."""
        cdef cnp.ndarray features = self._features(x)
        cdef u32 d = <u32> features.shape[0]
        self._checked(rows, d)
        return context_choose(&self.state, <double*> cnp.PyArray_DATA(rows), NULL,
                              <u32> rows.shape[0], d, <double*> cnp.PyArray_DATA(features),
                              uniform)

    def learn(self, cnp.ndarray rows, x, rewards, u64 turn, double weight=1.0):
        """Return new rows after one observation. rewards: f64[k], NaN where unknown; turn: the
        number of the observation."""
        cdef cnp.ndarray features = self._features(x), given = _doubles(rewards, "rewards")
        cdef u32 d = <u32> features.shape[0], i, k = <u32> self._checked(rows, d).shape[0]
        if given.ndim != 1 or given.shape[0] != k or not weight >= 0:
            raise_for(BAD_INPUT, f"rewards must be f64[{k}], weight at least 0")
        cdef cnp.ndarray after = <cnp.ndarray> cnp.PyArray_NewCopy(rows, cnp.NPY_CORDER)
        cdef double* row = <double*> cnp.PyArray_DATA(after)
        cdef const double* reward = <double*> cnp.PyArray_DATA(given)
        with nogil:
            for i in range(k):
                context_learn(&self.state, row + i * context_columns(d), d,
                              <double*> cnp.PyArray_DATA(features), reward[i],
                              weight, turn)
        return after

    def sums(self, cnp.ndarray rows, u32 d):
        """Return (sums of x x', f64[k, d, d], without the ridge; sums of reward x, f64[k, d])."""
        self._checked(rows, d)
        lower = np.zeros((rows.shape[0], d, d))
        lower[:, *np.tril_indices(d)] = rows[:, :_row(d)]
        return lower @ lower.transpose(0, 2,
                                       1) - self.state.ridge * np.eye(d), np.array(rows[:,
                                               _row(d):])

    def rows(self, products, rewards):
        """Return the rows that have these sums."""
        cdef cnp.ndarray a = _doubles(products, "products"), b = _doubles(rewards, "rewards")
        if (a.ndim != 3 or b.ndim != 2 or a.shape[1] != a.shape[2] or a.shape[0] != b.shape[0]
            or a.shape[1] != b.shape[1]):
            raise_for(BAD_INPUT, "products must be f64[k, d, d] and rewards f64[k, d]")
        cdef u32 d = <u32> a.shape[1], i
        lower = np.tril_indices(d)
        cdef cnp.ndarray made = np.empty((a.shape[0], self.columns(d)))
        made[:, :_row(d)] = (a + self.state.ridge * np.eye(d))[:, *lower]
        made[:, _row(d):] = b
        for i in range(<u32> a.shape[0]):
            _factor(<double*> cnp.PyArray_DATA(made) + i * context_columns(d), d,
                    self.state.ridge * 1e-3)
        return made


cdef double blend(const double* rows, u32 k, double ridge, double* z, u64 n, double* answers,
                  double* scatter) noexcept nogil:
    """Blend z[n, k + 1], with NaN for a model without an output, into answers[n]. Return the
    standard deviation of the errors that the weights leave.

    scatter: set to the standard deviation of the outputs around their mean, averaged over elements.
    """
    cdef double[BLENDED_MAX + 1] weight
    cdef double left = blend_weights(rows, k, ridge, weight)
    cdef double middle, largest, around
    cdef u64 e
    cdef u32 i
    blend_fill(rows, k, ridge, z, n)
    scatter[0] = 0.0
    for e in range(n):
        answers[e] = weight[k]
        middle = 0.0
        largest = 1e-300
        around = 0.0
        for i in range(k):
            answers[e] += weight[i] * z[i]
            middle += z[i] / k
            largest = fmax(largest, fabs(z[i]))
        for i in range(k):
            around += ((z[i] - middle) / largest) * ((z[i] - middle) / largest)
        scatter[0] += largest * sqrt(around / k) / n
        z += k + 1
    return left


cdef class Blend:
    """Ridge regression on the numbers of k models, 1 to 64; it takes rows f64[k + 1, k + 3] and
    returns new rows; nothing is changed in place. Threads: any. Rows of zeros have learned nothing,
    and blend to the mean.

    ridge: how strongly the weights are drawn to the mean, in observations. discount: factor of what
    was learned, per observation.
    """
    cdef double ridge, discount

    def __cinit__(self, *, double ridge, double discount):
        if not (ridge >= 0 and 0 < discount <= 1):
            raise_for(BAD_INPUT, "ridge is at least 0, discount in (0, 1]")
        self.ridge = ridge
        self.discount = discount

    cdef u32 _models(self, cnp.ndarray rows) except 0:
        cdef u32 k = <u32> rows.shape[0] - 1
        if (cnp.PyArray_TYPE(rows) != cnp.NPY_DOUBLE or rows.ndim != 2
            or not cnp.PyArray_IS_C_CONTIGUOUS(rows)
                or not 1 <= k <= BLENDED_MAX or rows.shape[1] != k + 3):
            raise_for(BAD_INPUT, f"rows must be f64[k + 1, k + 3] with 1 to {BLENDED_MAX} models")
        return k

    cdef cnp.ndarray _elements(self, object outputs, u32 k):
        """Return f64[n, k + 1], with space for the label. Each model has an output for all
        elements, or for none."""
        cdef cnp.ndarray given = _doubles(outputs, "outputs")
        if given.ndim != 2 or given.shape[0] < 1 or given.shape[1] != k:
            raise_for(BAD_INPUT, f"outputs must be f64[n, {k}]")
        cdef cnp.ndarray made = np.empty((given.shape[0], k + 1))
        cdef const double* source = <double*> cnp.PyArray_DATA(given)
        cdef double* target = <double*> cnp.PyArray_DATA(made)
        cdef Py_ssize_t e
        cdef u32 i
        for e in range(given.shape[0]):
            for i in range(k):
                if isinf(source[e * k + i]) or isnan(source[e * k + i]) != isnan(source[i]):
                    raise_for(BAD_INPUT,
                              "outputs must be finite, or NaN for all elements of a model")
                target[e * (k + 1) + i] = source[e * k + i]
            target[e * (k + 1) + k] = 0.0
        return made

    def learn(self, cnp.ndarray rows, outputs, label, double weight=1.0):
        """Return new rows after one observation. outputs: f64[n, k], n the elements of an output,
        NaN for a model without one; label: f64[n]. The rows are unchanged if there is no output, or
        numbers overflow."""
        cdef u32 k = self._models(rows)
        cdef cnp.ndarray z = self._elements(outputs, k), given = _doubles(label, "labels")
        if (given.ndim != 1 or given.shape[0] != z.shape[0] or not np.isfinite(given).all()
            or not weight > 0):
            raise_for(BAD_INPUT, f"labels must be f64[{z.shape[0]}], finite, weight above 0")
        if np.isnan(z[0, :k]).all():
            return rows
        z[:, k] = given
        cdef cnp.ndarray after = <cnp.ndarray> cnp.PyArray_NewCopy(rows, cnp.NPY_CORDER)
        with nogil:
            blend_learn(<double*> cnp.PyArray_DATA(after), k, self.ridge, self.discount,
                        <double*> cnp.PyArray_DATA(z),
                        <u64> z.shape[0], weight)
        return after if np.isfinite(after).all() else rows

    def weights(self, cnp.ndarray rows):
        """Return (f64[k + 1]: each model's weight, then the constant; standard deviation of the
        errors that they leave)."""
        cdef u32 k = self._models(rows)
        cdef cnp.ndarray w = np.empty(k + 1)
        cdef double left = blend_weights(<double*> cnp.PyArray_DATA(rows), k, self.ridge,
                                         <double*> cnp.PyArray_DATA(w))
        return w, left

    def blended(self, cnp.ndarray rows, outputs):
        """Blend outputs f64[n, k], NaN for a model without one. Return (answers f64[n]; standard
        deviation of the errors that the weights leave; standard deviation of the outputs around
        their mean, averaged over the elements)."""
        cdef u32 k = self._models(rows)
        cdef cnp.ndarray z = self._elements(outputs, k)
        cdef u64 n = <u64> z.shape[0]
        cdef cnp.ndarray answers = np.empty(n)
        cdef double left, scatter
        with nogil:
            left = blend(<double*> cnp.PyArray_DATA(rows), k, self.ridge,
                          <double*> cnp.PyArray_DATA(z), n,
                          <double*> cnp.PyArray_DATA(answers), &scatter)
        return answers, left, scatter

    def blended_numbers(self, cnp.ndarray rows, tuple models not None, predictions):
        """Blend one number of each model. Return (answer, the two deviations that `blended`
        returns, models used); None if the predictions are not all finite numbers of these models,
        with a float among them.

        predictions: by model, objects with `output`.
        """
        cdef double[BLENDED_MAX + 1] z
        cdef u8[BLENDED_MAX] arrived
        cdef double left, answer, scatter
        cdef u32 i, n, k = self._models(rows)
        if type(predictions) is not dict or len(models) != k:
            return None
        n = numbers_read(models, <dict> predictions, z, arrived)
        if n == 0:
            return None
        for i in range(k):
            if not arrived[i]:
                z[i] = NAN
        z[k] = 0.0
        left = blend(<double*> cnp.PyArray_DATA(rows), k, self.ridge, z, 1, &answer, &scatter)
        return answer, left, scatter, models_used(models, arrived, n)

    def filled(self, cnp.ndarray rows, outputs):
        """Return outputs f64[n, k] with each NaN replaced by the output that is expected, given the
        others."""
        cdef u32 k = self._models(rows)
        cdef cnp.ndarray z = self._elements(outputs, k)
        blend_fill(<double*> cnp.PyArray_DATA(rows), k, self.ridge, <double*> cnp.PyArray_DATA(z),
                   <u64> z.shape[0])
        return z[:, :k]
