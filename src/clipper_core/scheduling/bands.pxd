# Bands: which row goes next where a model's queue holds rows of several owners.
#
# A band is a share of a model's capacity and a priority, as a small number. Shares have numbers: 0
# is of all whose owner has none. Priorities are 1, the highest, 2, the usual one, and 3. Band 0 has
# share 0 and priority 2. Lanes belong to one band each; a model whose rows are all of band 0 has
# no BandTurns, and its rows go by their deadlines alone.
#
# Between priorities the order is strict, except that each lower one with rows that wait keeps
# LOWER_SHARE, 5 %, of the rows. Within one priority shares are served by start-time fair queueing
# (Goyal, Vin, Cheng, SIGCOMM 1996, section 2): each share has a virtual time, which its rows move
# on by 1 / weight, and the share that is least far goes next; one that had no rows begins at the
# time of the row that was chosen last, so it gets nothing for the time in which it asked for none.
# Within a band rows go by their deadlines.
#
# Threads: loop only; band_of, band_rank: any.
from clipper_core.runtime.machine cimport atomic, u32, u64

cdef enum:
    PRIORITIES = 3
    PRIORITY_USUAL = 2
    SHARES_MAX = 15             # shares with a number of their own, beside 0
    BANDS = 48                  # PRIORITIES * (SHARES_MAX + 1): one bit each of a word
    WEIGHT_USUAL = 100          # of share 0, until weights are set

cdef cppclass BandTurns:        # of one model
    double start[48]            # by band: the virtual time of its next row
    double now[3]               # by rank: the virtual time of the row that was chosen last
    double owed[3]              # by rank: rows that a lower priority is to get before higher ones
    double rate[48]             # by band: recent rate of rows that were sent, per microsecond
    double sent[48]             # by band: rows since `rated_us`
    u64 rated_us
    u64 mask                    # of the last choice: the bands whose rows wait
    u32 top                     # of the last choice: the highest rank of them
    double at_once              # of the last choice: rows that may be sent until another is next

# Return the number of a band. priority: 1 to 3.
cdef inline u32 band_of(u32 share, u32 priority) noexcept nogil:
    return share * PRIORITIES + (0 if priority == 2 else 1 if priority == 1 else 2)

# Return the rank of a band: 0 for priority 1.
cdef inline u32 band_rank(u32 band) noexcept nogil:
    cdef u32 code = band % PRIORITIES
    return 1 if code == 0 else 0 if code == 1 else 2

# Check a priority that a caller has given. Raises BAD_INPUT.
cdef u32 priority_of(object priority) except 0
# Allocate. NULL: no memory.
cdef BandTurns* band_turns_new() noexcept nogil
# Return the band whose row goes next, of those with a bit in `mask`, which has one. weights: by
# share.
cdef u32 band_turns_choose(BandTurns* t, u64 mask, const atomic[u32]* weights) noexcept nogil
# Count rows as sent, of the band of the last choice or, in a batch by cost, of another one. rows:
# where these differ in cost, their cost by that of a mean row.
cdef void band_turns_charge(BandTurns* t, u32 band, double rows,
                            const atomic[u32]* weights) noexcept nogil
# Divide `rows` among the bands as they would be sent from now on, and add them to given[48].
# waiting: the rows of each band.
cdef void band_turns_divide(const BandTurns* t, const u64* waiting, u32 rows, u32* given,
                            const atomic[u32]* weights) noexcept nogil
# Learn the rates at which rows were sent.
cdef void band_turns_rate(BandTurns* t, u64 now_us) noexcept nogil
# Return how many rows go before the next one of a band. own: rows of the band that are before it.
# waiting: the rows of each band. speed: rows per microsecond that the replicas can do; 0: unknown.
cdef u64 band_turns_ahead(const BandTurns* t, u32 band, u64 own, const u64* waiting, double speed,
                          const atomic[u32]* weights) noexcept nogil
