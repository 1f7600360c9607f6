"""Rows that are sent to no container for a while. There are few, so they are looked through."""


cdef void _forget(RefusedRows* refused, u32 i) noexcept nogil:
    refused.count -= 1
    refused.rows[i] = refused.rows[refused.count]


cdef void refused_rows_add(RefusedRows* refused, const Key* key, u64 until_us,
                           u64 now_us) noexcept nogil:
    cdef u32 i, soonest = 0
    if refused_rows_has(refused, key, now_us):
        return
    if refused.count == REFUSED_ROWS_MAX:
        for i in range(refused.count):
            if refused.rows[i].until_us < refused.rows[soonest].until_us:
                soonest = i
        _forget(refused, soonest)
    refused.rows[refused.count].key = key[0]
    refused.rows[refused.count].until_us = until_us
    refused.count += 1


cdef bint refused_rows_has(RefusedRows* refused, const Key* key, u64 now_us) noexcept nogil:
    cdef u32 i = 0
    while i < refused.count:
        if refused.rows[i].until_us <= now_us:
            _forget(refused, i)
        elif refused.rows[i].key.lo == key.lo and refused.rows[i].key.hi == key.hi:
            return True
        else:
            i += 1
    return False
