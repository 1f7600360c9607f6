"""Which rows make a batch, where rows differ in cost.

The row that is due first is always in the batch: so no row starves, whatever is cheaper. Without
padding the rows behind it follow in the order of their deadlines, except those that do not fit.

With padding it pays to put rows of like cost together. For each cost that the dearest row may have,
the best batch below it holds the row that is due first and the dearest others: each row that is
added takes as long as the dearest, and does only the work of its own cost. So rows are added as
long as they raise the useful cost per microsecond, `worth`, and of all dearest rows the one with
the greatest worth is taken. The fixed time of a batch, as the batcher's line has it, decides how
unlike the rows may be: with none of it, only equals go together.

A row that would be late in a batch of its own after this one must go now (`must`), whatever its
cost, if it is in time with it. There may be several such rounds: each makes the batch longer.
"""
from libc.stdlib cimport free
from libcpp.algorithm cimport sort
from libcpp.vector cimport vector

from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.machine cimport aligned_new
from clipper_core.scheduling.batcher cimport batcher_cost_predict_us, batcher_cost_worst_us
from clipper_core.scheduling.lane cimport task_due_us, task_needed
from clipper_core.scheduling.task cimport WAITING, Lane, Task, task_of, ticket_of

cdef enum:
    CANDIDATES_MAX = 1024       # rows that are looked at for one batch
    STEPS_MAX = 8192            # cells that are looked at for them
    ROUNDS_MAX = 4

cdef double FIXED_ROWS = 4      # while the line is unknown, a batch's fixed time is that of so many
                                # rows


cdef CostBatch* cost_batch_new(u8 kind, bint padded, u32 item_bytes) noexcept nogil:
    cdef CostBatch* c = <CostBatch*> aligned_new(sizeof(CostBatch))
    if c == NULL:
        return NULL
    c.kind, c.padded, c.item_bytes = kind, padded, max(item_bytes, <u32> 1)
    c.rows = make[vector[Candidate]]()
    c.keys = make[vector[u64]]()
    c.sums = make[vector[double]]()
    if (c.rows == NULL or c.keys == NULL or c.sums == NULL
        or not (make_room(c.rows[0], CANDIDATES_MAX) and make_room(c.keys[0], CANDIDATES_MAX)
                and make_room(c.sums[0], CANDIDATES_MAX + 1))):
        cost_batch_free(c)
        return NULL
    return c


cdef void cost_batch_free(CostBatch* c) noexcept nogil:
    if c != NULL:
        del c.rows
        del c.keys
        del c.sums
        free(c)


cdef u32 row_cost(const CostBatch* c, u64 nbytes, u32 given) noexcept nogil:
    cdef u64 cost = given
    if c.kind == COST_BYTES:
        cost = nbytes
    elif c.kind == COST_LENGTH:
        cost = nbytes / c.item_bytes
    return <u32> min(max(cost, <u64> 1), <u64> 0xFFFFFFFF)


# -- candidates

cdef void _add(CostBatch* c, Lanes* lanes, u64 ticket, u32 avoid) noexcept nogil:
    cdef Task* task = task_of(lanes, ticket)
    cdef Candidate row
    if task == NULL or task.phase != WAITING or not task_needed(lanes, task):
        return
    if avoid and task.tries and task.left == avoid:
        return
    row.ticket = ticket
    row.due_us = task_due_us(task)
    row.cost = row_cost(c, task.bytes, task.rows)
    row.must = row.chosen = False
    c.rows.push_back(row)


cdef void _add_lane(CostBatch* c, Lanes* lanes, Lane* lane, size_t most, u32 avoid) noexcept nogil:
    cdef size_t i
    cdef u64 pos = lane.head, end = min(lane.seen, lane.head + STEPS_MAX)
    for i in range(lane.retry.size()):
        if c.rows.size() >= most:
            return
        if avoid == 0 or lane.retry[0][i].failed_on != avoid:
            _add(c, lanes, lane.retry[0][i].ticket, 0)
    while pos < end and c.rows.size() < most:
        _add(c, lanes, ticket_of(lane.id, pos), avoid)
        pos += 1


cdef bint cost_batch_collect(CostBatch* c, ModelQueue* queue, Lanes* lanes, u32 avoid,
                             u64 now_us) noexcept nogil:
    cdef size_t i, first = 0, used = 0
    c.rows.clear()
    for i in range(queue.lanes.size()):
        used += queue.lanes[0][i].waiting > 0
    for i in range(queue.lanes.size()):
        if queue.lanes[0][i].waiting:
            _add_lane(c, lanes, queue.lanes[0][i],
                      min(c.rows.size() + CANDIDATES_MAX / used, <size_t> CANDIDATES_MAX), avoid)
    if c.rows.empty():
        return False
    for i in range(c.rows.size()):
        if c.rows[0][i].due_us < c.rows[0][first].due_us:
            first = i
    c.rows[0][0], c.rows[0][first] = c.rows[0][first], c.rows[0][0]
    return True


# -- the choice

cdef void cost_batch_alone(CostBatch* c) noexcept nogil:
    cdef size_t i
    for i in range(c.rows.size()):
        c.rows[0][i].chosen = i == 0
    c.choice.n = 1
    c.choice.cost = c.choice.useful = c.rows[0][0].cost
    c.choice.full = False
    c.choice.worth = 0


cdef void cost_batch_choose(CostBatch* c, const Batcher* b, u32 rows_max, double limit,
                            u64 start_us) noexcept nogil:
    cdef size_t i
    cdef u32 rounds = 0
    for i in range(c.rows.size()):
        c.rows[0][i].chosen = c.rows[0][i].must = i == 0
    if not c.padded:
        _choose_by_deadline(c, b, rows_max, limit)
        return
    _choose_alike(c, b, rows_max, limit)
    while rounds < ROUNDS_MAX and _must_more(c, b, rows_max, limit, start_us):
        _choose_alike(c, b, rows_max, limit)
        rounds += 1


cdef void _choose_by_deadline(CostBatch* c, const Batcher* b, u32 rows_max,
                              double limit) noexcept nogil:
    cdef size_t i, k
    cdef Candidate* row
    cdef Choice* choice = &c.choice
    cost_batch_alone(c)
    c.keys.clear()
    for i in range(1, c.rows.size()):           # a slack of an hour and more is as good as any
        c.keys.push_back(min(c.rows[0][i].due_us - c.rows[0][0].due_us, <u64> 0xFFFFFFFF) << 32 | i)
    sort(c.keys.begin(), c.keys.end())
    for k in range(c.keys.size()):
        row = &c.rows[0][<u32> c.keys[0][k]]
        if choice.n >= rows_max:
            break
        if choice.cost + row.cost > limit:
            choice.full = True
            continue
        row.chosen = True
        choice.n += 1
        choice.cost += row.cost
    choice.useful = choice.cost
    choice.worth = choice.useful / max(batcher_cost_predict_us(b, choice.cost), 1.0)


cdef void _choose_alike(CostBatch* c, const Batcher* b, u32 rows_max, double limit) noexcept nogil:
    """The batch of the greatest worth that holds all rows that must go."""
    cdef double fixed_us = batcher_cost_predict_us(b, 0), unit_us = (batcher_cost_predict_us(b, 1)
                                                                    - fixed_us)
    cdef double top = 0, sum = 0
    cdef u32 musts = 0, others
    cdef size_t i, k, below = 0, best_below = 0
    cdef u32 best_count = 0
    cdef Choice best, found
    if unit_us <= 0:
        unit_us = 1
        fixed_us = max(fixed_us, FIXED_ROWS * b.unit)
    c.keys.clear()
    for i in range(c.rows.size()):
        if c.rows[0][i].must:
            musts += 1
            sum += c.rows[0][i].cost
            top = max(top, <double> c.rows[0][i].cost)
        else:
            c.keys.push_back(<u64> c.rows[0][i].cost << 32 | i)
    sort(c.keys.begin(), c.keys.end())
    c.sums.clear()
    c.sums.push_back(0)
    for k in range(c.keys.size()):
        c.sums.push_back(c.sums[0][k] + (c.keys[0][k] >> 32))
        below += (c.keys[0][k] >> 32) <= top
    best.n = 0
    for k in range(below, c.keys.size() + 1):   # the dearest is one that must go, or others[k - 1]
        if k > below:
            top = c.keys[0][k - 1] >> 32
            if (musts + 1) * top > limit or musts >= rows_max:
                break
        others = _others(c, k, musts, sum, top, fixed_us, unit_us, rows_max, limit, k > below,
                        &found)
        if best.n == 0 or found.worth > best.worth:
            best = found
            best_below, best_count = k, others
    for i in range(c.rows.size()):
        c.rows[0][i].chosen = c.rows[0][i].must
    for k in range(best_below - best_count, best_below):
        c.rows[0][<u32> c.keys[0][k]].chosen = True
    c.choice = best


cdef u32 _others(const CostBatch* c, size_t below, u32 musts, double sum, double top,
                 double fixed_us, double unit_us, u32 rows_max, double limit, bint one,
                 Choice* found) noexcept nogil:
    """How many of others[:below], the dearest first, go with those that must, where the dearest row
    costs `top`. one: at least one of them does.

    Each further one is worth less than the one before, so the last that raises the worth is found
    by halving."""
    cdef double room = min(limit / top, <double> rows_max) - musts
    cdef u32 fitting = <u32> min(max(room, 0.0), <double> below)
    cdef u32 low = 1 if one else 0, high = max(fitting, low), middle
    cdef double useful
    while low < high:
        middle = (low + high + 1) / 2
        useful = sum + c.sums[0][below] - c.sums[0][below - middle + 1]
        # is the middle-th worth more than those before it on average?
        if (c.keys[0][below - middle] >> 32) * (fixed_us + unit_us * (musts + middle - 1)
                                               * top) >= unit_us * top * useful:
            low = middle
        else:
            high = middle - 1
    found.n = musts + low
    found.useful = sum + c.sums[0][below] - c.sums[0][below - low]
    found.cost = found.n * top
    found.worth = found.useful / (fixed_us + unit_us * found.cost)
    found.full = low == fitting and low < below and found.n < rows_max
    return low


cdef bint _must_more(CostBatch* c, const Batcher* b, u32 rows_max, double limit,
                     u64 start_us) noexcept nogil:
    """Find the rows that cannot wait for the next batch, and can go in this one. True: some."""
    cdef size_t i
    cdef Candidate* row
    cdef double end_us = start_us + batcher_cost_worst_us(b, c.choice.cost)
    cdef double top = 0, longer_us
    cdef u32 musts = 0
    cdef bint more = False
    for i in range(c.rows.size()):
        if c.rows[0][i].must:
            musts += 1
            top = max(top, <double> c.rows[0][i].cost)
    for i in range(c.rows.size()):
        row = &c.rows[0][i]
        if row.chosen or row.must or row.due_us >= end_us + batcher_cost_worst_us(b, row.cost):
            continue
        longer_us = start_us + batcher_cost_worst_us(b, (musts + 1) * max(top, <double> row.cost))
        if (musts >= rows_max or (musts + 1) * max(top, <double> row.cost) > limit
                or longer_us > min(row.due_us, c.rows[0][0].due_us)):
            continue
        row.must = more = True
        musts += 1
        top = max(top, <double> row.cost)
    return more
