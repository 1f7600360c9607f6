"""Batches as they end, as words in a queue."""
from clipper_core.runtime.machine cimport relaxed, release
from clipper_core.runtime.ring cimport spsc_new
from clipper_core.scheduling.task cimport Task, task_of


cdef bint batch_log_open(Lanes* lanes, u64 words) noexcept nogil:
    if lanes.log == NULL:
        lanes.log = spsc_new(words)
    if lanes.log != NULL:
        lanes.logging.store(1, release)
    return lanes.log != NULL


cdef void batch_log_put(Lanes* lanes, const Span* spans, u32 span_count, u32 rows, u32 replica,
                        u64 sent_us, u64 begun_us,
                        u64 now_us) noexcept nogil:
    cdef u64 ids[LOGGED_TASKS_MAX]
    cdef u64 n = 0
    cdef u64 i
    cdef u32 s
    cdef Task* task
    for s in range(span_count):
        task = task_of(lanes, spans[s].ticket)
        while task != NULL and n < LOGGED_TASKS_MAX:
            ids[n] = task.block.first_id + (task.slot if task.slots == NULL else task.slots[0])
            n += 1
            task = task_of(lanes, task.next) if task.next else NULL
    if lanes.log.room() < n + RECORD_HEAD + 1:
        lanes.log_lost.fetch_add(1, relaxed)
        return
    lanes.log.push(n + RECORD_HEAD)
    lanes.log.push((<u64> replica << 32) | rows)
    lanes.log.push(sent_us)
    lanes.log.push(begun_us)
    lanes.log.push(now_us)
    for i in range(n):
        lanes.log.push(ids[i])
