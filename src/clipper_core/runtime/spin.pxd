# Polling for a moment before sleeping: to wake a thread whose core sleeps takes 20 to 40 us, often
# more than what it waits for.
#
# Only while it pays: each spin that ends with what was waited for is one for, each that does not
# is one against, and with the score below zero only one in SPIN_TRIAL is tried. A gap between two
# polls shows that the machine has more threads to run than cores, and halves the score. A spin
# starts after a message, or with a request: an idle connection does not poll, and one with fewer
# messages than pay for it spends 1/SPIN_TRIAL of a spin a message.
#
# Threads: one.
from clipper_core.runtime.machine cimport u32, u64

cdef enum:
    SPIN_SCORE_MAX = 16
    SPIN_TRIAL = 64
    SPIN_GAP_US = 20            # between two polls: somebody else had the core

cdef struct Spin:
    u64 us                      # of a spin, at most; 0: never
    u64 end
    u64 polled
    u32 trials                  # with a score below zero
    int score

cdef inline bint spin_begin(Spin* s, u64 now) noexcept nogil:
    """Begin a spin. Return False if a spin is not worth its time now; else the caller polls."""
    if s.score < 0 and s.us:
        s.trials += 1
    if not s.us or (s.score < 0 and s.trials % SPIN_TRIAL):
        return False
    s.polled, s.end = now, now + s.us
    return True

cdef inline bint spin_on(Spin* s, u64 now) noexcept nogil:
    """Note that a poll found nothing. Return whether to poll again."""
    if now - s.polled <= SPIN_GAP_US and now < s.end:
        s.polled = now
        return True
    if now - s.polled > SPIN_GAP_US:
        s.score = max(s.score, 0) // 2
    s.score = max(s.score - 1, -1)
    return False

cdef inline void spin_paid(Spin* s) noexcept nogil:
    s.score = min(s.score + 1, SPIN_SCORE_MAX)

# Set the time of a spin, in us; 0, for no spins, where this thread may run on a single core only.
cdef void spin_init(Spin* s, u64 us) except *
