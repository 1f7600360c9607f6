# The replicas of one model together: which of them takes the next rows, and what a row submitted
# now could be promised.
#
# Threads: loop only, but for the atomics, which anyone may read.
from libcpp.vector cimport vector
from clipper_core.runtime.machine cimport atomic, i32, u32, u64
from clipper_core.scheduling.admission cimport Gate, Margin
from clipper_core.scheduling.replica cimport Replica
from clipper_core.scheduling.task cimport Lane, Lanes, Tally

cdef struct Trial:              # a row whose forecast is compared with what becomes of it; one at a
                                # time
    u64 ticket                  # 0: none
    u64 made_us
    double forecast_us
    u64 drops                   # of the model until then
    bint sent

ctypedef Replica* ReplicaPointer

cdef cppclass Crew:
    vector[Replica*]* members
    vector[double]* free_us     # scratch of the forecast: from now on until each is free
    u64 round                   # of handing out rows
    bint avoiding               # some members are ejected and others are not: those get nothing but
                                # probes
    u32 turn                    # where the search for a replica starts
    Margin margin
    Trial trial
    u64 speedups                # of the members until now
    u64 arrived                 # rows taken in or refused since `rated_us`
    u64 refused                 # rows refused at submission until now
    u64 rated_us
    double rate                 # rows offered a microsecond, of late
    u64 tight_us                # the tightest SLO asked of late, if rows of much longer ones wait;
                                # else 0
    u64 expected_us             # without a replica: none comes before; 0: who knows
    atomic[u64] delay_us        # for snapshots: the forecast wait of a row of the tightest SLO, and
                                # that SLO
    atomic[u64] slo_us
    atomic[u64] margin_1000

cdef bint crew_init(Crew* c) noexcept nogil                      # all zeros; False: no memory
cdef void crew_begin(Crew* c) noexcept nogil                     # all zeros but for its empty lists
# for one more member; False: no memory
cdef bint crew_room(Crew* c) noexcept nogil
cdef void crew_free(Crew* c) noexcept nogil

# it may be given rows at all
cdef bint replica_takes(const Replica* r) noexcept nogil
cdef void crew_look(Crew* c) noexcept nogil
# ^ before rows are handed out: who is ejected
cdef bint crew_has_other(const Crew* c, const Replica* r) noexcept nogil
# ^ somebody else may be given its rows
cdef bint crew_must_pass(const Crew* c, const Replica* r, const Lane* lane) noexcept nogil
# ^ its container has failed the rows at the head of the lane, and another may do better
cdef bint too_late(const Replica* r, u32 n, u64 due_us, u64 now_us) noexcept nogil
# ^ a row due then cannot finish in a batch of n on this replica
cdef bint another_can(Crew* c, const Replica* r, u64 waiting, u64 due_us, u64 now_us) noexcept nogil
# ^ but on another it can
cdef i32 crew_pick(Crew* c, u64 waiting, u64 now_us, u64* again_us) noexcept nogil
# ^ who is predicted to finish the next batch first, by index; -1: nobody now, and if again_us is
# set, look again then

cdef u32 crew_rows(const Crew* c, const Replica* r, u64 waiting, u64 tight) noexcept nogil
# ^ how many of those that wait its next batch takes, `tight` of them of the tightest SLO
cdef void crew_arrived(Crew* c, u64 rows, u64 now_us) noexcept nogil
cdef void crew_forecast(Crew* c, Lanes* lanes, Lane* lane, Gate* gate, u64 ahead, u64 behind,
                        bint shown,
                        u64 now_us) noexcept nogil
# ^ publish what a row submitted to this lane can expect; `ahead` rows of all lanes are due before
# it, and the `behind` due later
#   fill its batch; shown: in snapshots; gate NULL: there only
cdef void crew_learn(Crew* c, Lanes* lanes, Tally* tally, u64 now_us) noexcept nogil
# ^ the margin, from what became of the row on trial; and how much was offered that was refused
