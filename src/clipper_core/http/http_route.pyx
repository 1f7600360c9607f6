"""From the bytes of a body to those of an answer.

The body that is read here is `{"input": ROW}` and nothing beside. The counts are the same words of
memory that serving/tally and metrics/http_counts add to: who reads them sees one number, whoever
answered.
"""
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy

from clipper_core.cache.clock_cache cimport cache_lookup, key_of
from clipper_core.http.http_head cimport NO_LENGTH
from clipper_core.http.http_infer cimport infer_read, infer_write
from clipper_core.http.json_rows cimport Text, json_count, json_read_row
from clipper_core.http.json_value cimport (
    json_f64, json_put, large_body, large_body_chunk, large_body_drop, value_belief,
)
from clipper_core.http.recent_answers cimport RecentAnswers, recent_add
from clipper_core.results.completion cimport (
    block_drop, claims_lock, claims_unlock, slot_fill, slots_claim,
)
from clipper_core.runtime.dtype cimport ANY, BOOL, BYTES, F16, STR, itemsize
from clipper_core.runtime.histogram cimport count, histogram_record
from clipper_core.runtime.machine cimport acquire, aligned_new, monotonic_us, relaxed
from clipper_core.runtime.row_hash cimport Key
from clipper_core.runtime.status cimport (
    CANCELLED, CLOSED, NO_MEMORY, OK, PENDING, Status, raise_for,
)
from clipper_core.scheduling.lane cimport submitter_enter, submitter_leave
from clipper_core.scheduling.submit cimport (
    lane_prepare, row_bytes_end, row_refused, row_submit,
)
from clipper_core.wire.prediction cimport TAG_BLOB, TAG_NONE, value_drop

cdef enum:
    ROW_BYTES_MAX = 16777216    # longer rows are Python's


# -- reading
# --------------------------------------------------------------------------------------------------

cdef inline void _skip_blanks(Text* text) noexcept nogil:
    while text.at < text.end and (text.at[0] == 32 or text.at[0] == 10 or text.at[0] == 13
                                  or text.at[0] == 9):
        text.at += 1


cdef inline bint _take(Text* text, const char* word, u64 n) noexcept nogil:
    """A token, with blanks before it."""
    _skip_blanks(text)
    if <u64> (text.end - text.at) < n or memcmp(text.at, word, n) != 0:
        return False
    text.at += n
    return True


cdef bint _read_row(RouteState* r, Text* text, Bytes* row) noexcept nogil:
    """A row from JSON, at the beginning of `row`."""
    cdef Wanted wanted = r.wanted
    cdef u64 elements = 1
    cdef u32 i
    cdef u8* to
    _skip_blanks(text)
    if r.variable:
        wanted.dims[0] = json_count(text)
    for i in range(wanted.rank):
        elements *= wanted.dims[i]
    if elements > <u64> (text.end - text.at) or elements * itemsize(wanted.dtype) > ROW_BYTES_MAX:
        return False            # before memory is asked for: every number takes a digit
    row.clear()
    to = row.reserve(elements * itemsize(wanted.dtype) + 8)
    if to == NULL or not json_read_row(text, &wanted, to):
        return False
    row.end += elements * itemsize(wanted.dtype)
    return True


cdef bint _read_predict(RouteState* r, const u8* body, u64 n, Bytes* row) noexcept nogil:
    cdef Text text
    text.at, text.end = body, body + n
    if not (_take(&text, "{", 1) and _take(&text, "\"input\"", 7) and _take(&text, ":", 1)
            and _read_row(r, &text, row)
            and _take(&text, "}", 1)):
        return False
    _skip_blanks(&text)
    return text.at == text.end


# -- asking
# --------------------------------------------------------------------------------------------------

cdef u64 _number(CompletionState* d) noexcept nogil:
    """Of an answer without a slot."""
    cdef u64 number
    claims_lock(d.lock)
    number = d.next_id
    d.next_id += 1
    claims_unlock(d.lock)
    return number


cdef Status _submit(Query* q, const Bytes* row, const Key* key) noexcept nogil:
    cdef EngineState* e = q.route.engine
    cdef Status status = CLOSED
    if submitter_enter(e.lanes[0], e.refusing):
        status = row_submit(e, q.route.model, row.at(), row.size(), key, 0, q.route.slo_us,
                            q.began_us, q.block, q.slot, 0)
        submitter_leave(e.lanes[0])
    return status


cdef QueryOutcome _ask(Query* q, const Bytes* row) noexcept nogil:
    cdef RouteState* r = q.route
    cdef Key key
    cdef Status status
    q.value.word = 0
    q.value.tag = TAG_NONE
    q.block = NULL
    if row.size() >= row_bytes_end(r.engine):
        return OTHER            # too large: Python says so
    if r.model.cached:
        key = key_of(r.engine.cache, r.model.spec.uid, 0, row.at(), row.size())
        if cache_lookup(r.engine.cache, &key, &q.value):
            count(&r.model.tally.hits, 1)
            count(r.asked, 1)
            q.number = _number(r.engine.completion)
            return VALUE
    if not slots_claim(r.engine.completion, 1, &q.block, &q.slot):
        return OTHER            # no memory: Python says so
    count(r.asked, 1)
    q.number = q.block.first_id + q.slot
    status = _submit(q, row, &key)
    if status == OK:
        return OPEN
    row_refused(r.model, status, r.slo_us, q.began_us, &q.value)
    slot_fill(r.engine.completion, q.block, q.slot, status, &q.value)
    block_drop(r.engine.completion, q.block, 1)
    q.value.tag = TAG_NONE
    return ENDED


cdef bint _is_quotable(const Head* head) noexcept nogil:
    cdef u32 i
    for i in range(head.id_bytes):
        if head.id[i] == 34 or head.id[i] == 92:
            return False
    return True


cdef QueryOutcome query_ask(Query* q, const Head* head, const u8* body, Bytes* row) noexcept nogil:
    cdef RouteState* r = q.route
    cdef bint binary = False
    if r.form == INFER:
        if not (_is_quotable(head)
                and infer_read(&r.wanted, r.model.finite, body, head.body_bytes, head.json_bytes,
                               row, &q.tag,
                                                  &binary)):
            return OTHER
        q.binary = binary
    elif head.json_bytes != NO_LENGTH or not _read_predict(r, body, head.body_bytes, row):
        return OTHER
    q.id_bytes = head.id_bytes
    if head.id_bytes:
        memcpy(q.id, head.id, head.id_bytes)
    return _ask(q, row)


cdef CompletionState* query_home(const Query* q) noexcept nogil:
    return q.route.engine.completion


cdef void query_drop(Query* q) noexcept nogil:
    """As a future that nobody holds any more."""
    cdef CompletionState* d = q.route.engine.completion
    cdef u8 state
    cdef Value value
    value_drop(&q.value)
    if q.block == NULL:
        return
    state = q.block.state[q.slot].load(relaxed)
    if state != PENDING and state != CANCELLED and q.block.tag[q.slot] == TAG_BLOB:
        value.word = q.block.word[q.slot]
        value.tag = TAG_BLOB
        value_drop(&value)
        q.block.tag[q.slot] = TAG_NONE
    block_drop(d, q.block, 1)
    q.block = NULL


# -- answering
# --------------------------------------------------------------------------------------------------

cdef bint _predicted(Query* q, const Value* value, double belief, u32 latency_us,
                     Bytes* body, LargeBody* large) noexcept nogil:
    cdef Bytes* after = body if large == NULL else &large.tail
    body.put_text("{\"id\":\"")
    body.put(q.route.node.at(), q.route.node.size())
    body.put_hex(q.number)
    body.put_text("\",\"output\":")
    if not json_put(body, value, False, large):
        return False
    after.put_text(",\"confidence\":")
    json_f64(after, belief)
    after.put_text(",\"default\":false,\"reason\":\"\",\"models\":")
    after.put(q.route.models.at(), q.route.models.size())
    after.put_text(",\"missing\":[],\"agreement\":1.0,\"latency_us\":")
    after.put_decimal(latency_us)
    after.put_byte(125)
    return True


cdef bint _old(Query* q, const Value* value, Bytes* body, LargeBody* large) noexcept nogil:
    body.put_text("{\"query_id\":")
    body.put_decimal(q.number)
    body.put_text(",\"output\":")
    if not json_put(body, value, False, large):
        return False
    (body if large == NULL else &large.tail).put_text(",\"default\":false}")
    return True


cdef void _put_own(Query* q, Bytes* body) noexcept nogil:
    """The caller's name of the query, as JSON."""
    if q.id_bytes == 0:
        body.put(q.tag.at(), q.tag.size())
        return
    body.put_byte(34)
    body.put(q.id, q.id_bytes)
    body.put_byte(34)


cdef bint _inferred(Query* q, const Value* value, double belief, u64* json_bytes,
                    Bytes* body, LargeBody* large) noexcept nogil:
    body.put(q.route.head.at(), q.route.head.size())
    body.put(q.tag.at(), q.tag.size())
    body.put_text(",\"parameters\":{\"prediction_id\":\"")
    body.put(q.route.node.at(), q.route.node.size())
    body.put_hex(q.number)
    body.put_text("\",\"confidence\":")
    json_f64(body, belief)
    if q.id_bytes or q.tag.size() > 2:
        body.put_text(",\"request_id\":")
        _put_own(q, body)
    body.put_text("},")
    return infer_write(body, value, q.binary, json_bytes, large)


cdef void _put_id(Query* q, const Bytes* made, Bytes* out) noexcept nogil:
    if q.id_bytes:
        out.put(q.id, q.id_bytes)
    elif q.route.form == PREDICT:
        out.put(q.route.node.at(), q.route.node.size())
        out.put_hex(q.number)
    else:
        out.put(made.at(), made.size())


cdef void _count(Query* q, u32 latency_us) noexcept nogil:
    cdef RouteState* r = q.route
    count(r.answered, 1)
    count(r.decided, 1)
    count(r.used, 1)
    count(r.wins, 1)
    count(r.ok, 1)
    histogram_record(r.took, latency_us)
    histogram_record(r.requests, monotonic_us() - q.began_us)


cdef bint _write_body(Query* q, const Value* value, double belief, u32 latency_us,
                      u64* json_bytes, Bytes* body, LargeBody* large) noexcept nogil:
    """Put the body, or the part of it that goes before a large output. False: it is not plain."""
    body.clear()
    if q.route.form == PREDICT:
        return _predicted(q, value, belief, latency_us, body, large)
    if q.route.form == INFER:
        return _inferred(q, value, belief, json_bytes, body, large)
    return _old(q, value, body, large)


cdef bint query_answer(Query* q, const Value* value, u32 latency_us, const char* date,
                       const Bytes* made, bint close,
                       Bytes* body, Bytes* out, LargeBody** rest) noexcept nogil:
    cdef double belief = value_belief(value)
    cdef u64 json_bytes = 0
    cdef LargeBody* large
    if belief < q.route.confidence_min:
        return False
    large = large_body(value)
    if (not _write_body(q, value, belief, latency_us, &json_bytes, body, large) or body.lost
            or (large != NULL and large.tail.lost)):
        large_body_drop(large)
        return False
    out.put_text("HTTP/1.1 200 OK\r\ndate: ")
    out.put(date, 29)
    if json_bytes:
        out.put_text("\r\ncontent-type: application/octet-stream")
    else:
        out.put_text("\r\ncontent-type: application/json")
    if large != NULL and not json_bytes:
        large.chunked = True
        out.put_text("\r\ntransfer-encoding: chunked")
    else:
        out.put_text("\r\ncontent-length: ")
        out.put_decimal(body.size() + (large.bytes if large != NULL else 0))
    if json_bytes:
        out.put_text("\r\ninference-header-content-length: ")
        out.put_decimal(json_bytes)
    out.put_text("\r\nx-request-id: ")
    _put_id(q, made, out)
    if close:
        out.put_text("\r\nconnection: close")
    out.put_text("\r\n\r\n")
    if large != NULL and large.chunked:
        large_body_chunk(body, out)
    else:
        out.put(body.at(), body.size())
    if q.route.recent != NULL:
        recent_add(q.route.recent, q.number, q.route.owner, value, monotonic_us())
    _count(q, latency_us)
    rest[0] = large
    return True


# -- routes and tables
# -------------------------------------------------------------------------------------------------

cdef u64 _hash(const u8* path, u64 n) noexcept nogil:
    """FNV-1a: paths are our own, so nobody can make them collide."""
    cdef u64 h = 14695981039346656037u, i
    for i in range(n):
        h = (h ^ path[i]) * 1099511628211u
    return h ^ h >> 32


cdef RouteState* route_at(const TableState* table, const u8* path, u64 n) noexcept nogil:
    cdef u64 h = _hash(path, n)
    cdef u64 i = h & table.mask
    while table.places[i].route != NULL:
        if (table.places[i].hash == h and table.places[i].path_bytes == n
            and memcmp(table.places[i].path, path, n) == 0):
            return table.places[i].route
        i = (i + 1) & table.mask
    return NULL


cdef int _put(Bytes* to, bytes text) except -1:
    to.put(<const char*> text, len(text))
    return 0


cdef class HotRoute:
    """Threads: any; it never changes. One application, or one model, as queries see it now, asked
    in one form.

    form: `predict`, `old_predict`, `infer`.  node: what stands before the number in an answer's id.
    models: as answers name them, in JSON; of `infer`, what stands before the request's id. counts:
    those of serving/tally: asked, answered, decided, used, wins; took: its durations, microseconds.
    ok, requests: of HTTP: responses with 200, and their durations.  subject: handed back with a
    query that ends in Python. recent: keeps the answers for feedback, as those of `owner`; None:
    nobody does. ValueError for a model whose rows are not read here.
    """

    def __init__(self, Model model, str form, str node, bytes models, u64 slo_us,
                 double confidence_min, counts,
                 LatencyHistogram took, Counter ok, LatencyHistogram requests, subject,
                 RecentAnswers recent=None, u32 owner=0):
        cdef RouteState* r = new RouteState()
        self.state = r
        asked, answered, decided, used, wins = counts
        self.model, self.subject = model, subject
        self.counters = (asked, answered, decided, used, wins, took, ok, requests, recent)
        r.form = <u8> ("predict", "old_predict", "infer").index(form)
        self._set_rows()
        r.engine, r.model, r.slo_us, r.confidence_min = (model.engine.state, model.state, slo_us,
                confidence_min)
        _put(&r.node, f"{node}-".encode())
        _put(&r.head if r.form == INFER else &r.models, models)
        r.asked, r.answered, r.decided = (&(<Counter> asked).n, &(<Counter> answered).n,
                                          &(<Counter> decided).n)
        r.used, r.wins, r.ok = &(<Counter> used).n, &(<Counter> wins).n, &ok.n
        r.took, r.requests = took.h, requests.h
        r.owner = owner
        if recent is not None:
            r.recent = recent.state
        r.object = <void*> self
        lane_prepare(r.engine, r.model, slo_us)

    cdef int _set_rows(self) except -1:
        cdef ModelState* m = self.model.state
        cdef u32 i
        cdef u8 dtype = m.spec.dtype
        if dtype in (ANY, BOOL, F16, STR, BYTES) or self.model.similar is not None:
            raise ValueError(f"rows of {self.model.name} are not read here: "
                             f"{self.model.describe_input()}")
        self.state.wanted.dtype = dtype
        self.state.variable = self.model.shape == (-1,)
        if self.state.variable and self.state.form == INFER:
            raise ValueError(f"rows of {self.model.name} differ in length: infer is not read here")
        self.state.wanted.rank = <u32> len(self.model.shape)
        for i in range(self.state.wanted.rank):
            self.state.wanted.dims[i] = 0 if self.state.variable else self.model.shape[i]
        return 0

    def __dealloc__(self):
        del self.state

    @property
    def users(self):
        """Queries that are open."""
        return self.state.users.load(acquire)


cdef class HotTable:
    """Threads: any; it never changes. Routes by their exact path."""

    def __init__(self, dict routes):
        cdef u64 size = 4, i
        cdef bytes path
        cdef HotRoute route
        self.routes = dict(routes)
        while size < 2 * <u64> len(routes) + 2:
            size *= 2
        self.state = <TableState*> aligned_new(sizeof(TableState))
        if self.state != NULL:
            self.state.places = <Place*> calloc(size, sizeof(Place))
        if self.state == NULL or self.state.places == NULL:
            raise_for(NO_MEMORY, f"no memory for {len(routes)} routes")
        self.state.mask = size - 1
        for path, route in self.routes.items():
            i = _hash(<const u8*> (<const char*> path), len(path))
            self._place(i, path, route)

    def _place(self, u64 h, bytes path, HotRoute route):
        cdef u64 i = h & self.state.mask
        while self.state.places[i].route != NULL:
            i = (i + 1) & self.state.mask
        self.state.places[i] = Place(h, <const u8*> (<const char*> path), len(path), route.state)

    def __dealloc__(self):
        if self.state != NULL:
            free(self.state.places)
            free(self.state)

    def __len__(self):
        return len(self.routes)

    def __contains__(self, bytes path):
        return route_at(self.state, <const u8*> (<const char*> path), len(path)) != NULL

    @property
    def users(self):
        """Workers that look at it, and queries of its routes that are open."""
        cdef HotRoute route
        cdef u64 n = self.state.users.load(acquire)
        for route in self.routes.values():
            n += route.state.users.load(acquire)
        return n
