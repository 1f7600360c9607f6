"""The order of the bands of one model, and what a row of a band may expect of it.

A virtual time, and not a deficit counter per share (DRR), because rows are chosen one by one as a
batch is filled: so a batch of eight holds rows of all shares, and a share with one row does not
wait for the quantum of another. A late share is not given what it missed: it would hold up all
others for as long.
"""
cimport cython

from clipper_core.runtime.machine cimport aligned_new, relaxed
from clipper_core.runtime.status cimport BAD_INPUT, raise_for

cdef extern from *:
    """
    static inline unsigned clipper_first_bit(unsigned long long n) { return __builtin_ctzll(n); }
    """
    u32 first_bit "clipper_first_bit"(u64 n) noexcept nogil

cdef enum:
    LOWER_PERCENT = 5           # of the rows, for each priority below the highest that has rows

cdef double LOWER_SHARE = LOWER_PERCENT / 100.0
cdef u64 EACH_SHARE = 0x249249249249    # the bands of one priority: each third bit of 48
cdef double RATE_US = 2000              # rows are counted over at least this long
cdef double RATE_DECAY_US = 50000
cdef double ACTIVE = 1e-6               # rows per microsecond: a band that sends fewer is idle
cdef double MANY = 1e9                  # rows


cdef BandTurns* band_turns_new() noexcept nogil:
    return <BandTurns*> aligned_new(sizeof(BandTurns))


cdef inline u64 _bands_of(u32 rank) noexcept nogil:
    """Return the bands of a rank, one bit each."""
    return EACH_SHARE << (1 if rank == 0 else 0 if rank == 1 else 2)


cdef inline double _weight(u32 band, const atomic[u32]* weights) noexcept nogil:
    cdef u32 weight = weights[band // PRIORITIES].load(relaxed)
    return weight if weight else 1


cdef u32 _rank_next(BandTurns* t) noexcept nogil:
    """Return the rank whose row goes next: the highest, or a lower one that is owed a row."""
    cdef u32 rank
    t.top = PRIORITIES
    for rank in range(PRIORITIES):
        if t.mask & _bands_of(rank) == 0:
            t.owed[rank] = 0
        elif t.top == PRIORITIES:
            t.top = rank
    for rank in range(PRIORITIES - 1, t.top, -1):
        if t.owed[rank] >= 1:
            return rank
    return t.top


cdef u32 band_turns_choose(BandTurns* t, u64 mask, const atomic[u32]* weights) noexcept nogil:
    cdef u32 band, rank, lower, first = BANDS
    cdef u64 left
    cdef double at, first_at = 0, second_at = 0
    cdef bint several = False
    t.mask = mask
    rank = _rank_next(t)
    left = mask & _bands_of(rank)
    while left:
        band = first_bit(left)
        left &= left - 1
        at = max(t.start[band], t.now[rank])
        if first == BANDS or at < first_at:
            second_at = first_at
            several = first != BANDS
            first_at = at
            first = band
        elif not several or at < second_at:
            second_at = at
            several = True
    t.now[rank] = first_at
    t.at_once = (second_at - first_at) * _weight(first, weights) + 1 if several else MANY
    if rank > t.top:
        t.at_once = min(t.at_once, t.owed[rank])
    for lower in range(rank + 1, PRIORITIES):
        if mask & _bands_of(lower):
            t.at_once = min(t.at_once, (1 - t.owed[lower]) / LOWER_SHARE + 1)
    t.at_once = max(t.at_once, 1.0)
    return first


cdef void band_turns_charge(BandTurns* t, u32 band, double rows,
                            const atomic[u32]* weights) noexcept nogil:
    cdef u32 rank = band_rank(band), lower
    t.start[band] = max(t.start[band], t.now[rank]) + rows / _weight(band, weights)
    t.sent[band] += rows
    for lower in range(t.top + 1, PRIORITIES):
        if t.mask & _bands_of(lower):
            t.owed[lower] += rows * LOWER_SHARE
    if rank > t.top:
        t.owed[rank] -= rows


cdef void band_turns_divide(const BandTurns* t, const u64* waiting, u32 rows, u32* given,
                            const atomic[u32]* weights) noexcept nogil:
    cdef BandTurns later = t[0]
    cdef u32 band
    cdef u64 mask = 0
    for band in range(BANDS):
        if waiting[band]:
            mask |= <u64> 1 << band
    while rows and mask:
        band = band_turns_choose(&later, mask, weights)
        band_turns_charge(&later, band, 1, weights)
        given[band] += 1
        rows -= 1
        if given[band] >= waiting[band]:
            mask &= ~(<u64> 1 << band)


cdef void band_turns_rate(BandTurns* t, u64 now_us) noexcept nogil:
    cdef double span = <double> (now_us - t.rated_us) if now_us > t.rated_us else 0
    cdef u32 band
    if span < RATE_US:
        return
    for band in range(BANDS):
        t.rate[band] += (t.sent[band] / span - t.rate[band]) * span / (span + RATE_DECAY_US)
        t.sent[band] = 0
    t.rated_us = now_us


cdef double _part(const BandTurns* t, u32 band, const u64* waiting, double speed,
                  const atomic[u32]* weights) noexcept nogil:
    """Return the part of the capacity that a band gets if it asks for more: its share, and what
    bands that are not behind it lately left of the rest."""
    cdef u32 rank = band_rank(band), other, its_rank
    cdef double weight = _weight(band, weights), sum = weight, before = 0, part
    cdef bint higher = False
    cdef u32 lower = 0                          # one bit for each rank
    for other in range(BANDS):
        if other == band or (waiting[other] == 0 and t.rate[other] < ACTIVE):
            continue
        its_rank = band_rank(other)
        if its_rank > rank:
            lower |= <u32> 1 << its_rank
            continue
        before += t.rate[other]
        if its_rank < rank:
            higher = True
        else:
            sum += _weight(other, weights)
    part = weight / sum
    if higher:
        part *= LOWER_SHARE
    else:
        part *= 1 - LOWER_SHARE * ((lower >> 1 & 1) + (lower >> 2 & 1))
    return min(max(part, 1 - before / speed), 1.0) if speed > 0 else part


cdef u64 band_turns_ahead(const BandTurns* t, u32 band, u64 own, const u64* waiting, double speed,
                          const atomic[u32]* weights) noexcept nogil:
    cdef u32 rank = band_rank(band), other
    cdef double weight = _weight(band, weights), each, rows = own
    for other in range(BANDS):
        if other == band or waiting[other] == 0 or band_rank(other) > rank:
            continue
        if band_rank(other) < rank:
            each = (own + 1) * (1 - LOWER_SHARE) / LOWER_SHARE
        else:
            each = (own + 1) * _weight(other, weights) / weight
        rows += min(each, <double> waiting[other])
    return <u64> max(rows, own / _part(t, band, waiting, speed, weights))


# -- Python
# -------------------------------------------------------------------------------------------------

cdef u32 priority_of(object priority) except 0:
    if type(priority) is not int or not 1 <= priority <= PRIORITIES:
        raise_for(BAD_INPUT, f"priority={priority!r:.40}: it is 1, the highest, to {PRIORITIES}, "
                             f"the lowest; without one it is {PRIORITY_USUAL}")
    return priority


def band_number(u32 share, priority):
    """Return the number of the band of a share, 0 to SHARES_MAX, and a priority, 1 to 3.

    Threads: any. Raises BAD_INPUT.
    """
    if share > SHARES_MAX:
        raise_for(BAD_INPUT, f"share {share}: shares have the numbers 0 to {SHARES_MAX}")
    return band_of(share, priority_of(priority))


@cython.final
cdef class BandOrder:
    """The order of the bands of one model, for tests. weights: of each share, by its number.

    Threads: one at a time.
    """
    cdef BandTurns turns
    cdef atomic[u32] weights[16]

    def __init__(self, list weights):
        cdef u32 share
        for share in range(<u32> len(weights)):
            self.weights[share].store(<u32> weights[share], relaxed)

    def choose(self, list bands):
        """Return which of these bands, all of which have rows, goes next."""
        cdef u64 mask = 0
        for band in bands:
            mask |= <u64> 1 << <u32> band
        return band_turns_choose(&self.turns, mask, self.weights)

    def charge(self, u32 band, double rows=1.0):
        """Count rows of the band that was chosen as sent."""
        band_turns_charge(&self.turns, band, rows, self.weights)

    def ahead(self, u32 band, u64 own, dict waiting, double speed=0.0):
        """Return how many rows go before the next one of a band, which has `own` rows before it.
        waiting: rows by band. speed: rows per microsecond."""
        cdef u64[BANDS] rows
        cdef u32 i
        for i in range(BANDS):
            rows[i] = waiting.get(i, 0)
        return band_turns_ahead(&self.turns, band, own, rows, speed, self.weights)
