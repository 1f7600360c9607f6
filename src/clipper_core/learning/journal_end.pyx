"""The end of the journal's last segment, in memory."""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy

from clipper_core.runtime.machine cimport u32
from clipper_core.wire.crc cimport crc32

cdef extern from "<sys/mman.h>" nogil:
    int PROT_READ
    int PROT_WRITE
    int MAP_SHARED
    void* MAP_FAILED
    void* mmap(void* addr, size_t length, int prot, int flags, int fd, long offset) noexcept
    int munmap(void* addr, size_t length) noexcept

cdef extern from "<errno.h>" nogil:
    int errno


cdef void head_of(u8* at, const u8* record, u64 nbytes) noexcept nogil:
    """The salt, all ones, makes sure that zeros are not a valid record."""
    cdef u32[2] head
    head[0] = <u32> nbytes
    head[1] = crc32(<u32> 0xFFFFFFFF ^ <u32> nbytes, record, nbytes)
    memcpy(at, head, HEAD_BYTES)


@cython.final
cdef class JournalEnd:
    """The pages at the end of a journal's last segment. Threads: any.

    keeps: False numbers records and keeps nothing.  at: offset of the next record.  room: offset
    that no append passes; 0 refuses all.  next: number of the next record.
    """

    def __cinit__(self, bint keeps):
        self.keeps = keeps
        self.next = 1

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.mapped)

    cdef u64 put(self, const u8* framed, u64 nbytes, u64 count) noexcept:
        if self.keeps:
            if self.at + nbytes > self.room or self.base == NULL:
                return 0
            memcpy(self.base + self.at, framed, nbytes)
            self.at += nbytes
        self.next += count
        return self.next - 1

    def append(self, bytes record not None):
        """Append a record. -> its number; 0, and nothing has changed, if there is no room."""
        cdef u64 n = <u64> PyBytes_GET_SIZE(record), end = self.at + HEAD_BYTES + n
        cdef const u8* data = <const u8*> PyBytes_AS_STRING(record)
        if self.keeps:
            if end > self.room or self.base == NULL:
                return 0
            memcpy(self.base + self.at + HEAD_BYTES, data, n)
            head_of(self.base + self.at, data, n)
            self.at = end
        self.next += 1
        return self.next - 1

    def append_framed(self, bytes framed not None, u64 count):
        """Append `count` records that have their heads. -> the number of the last; 0, and nothing
        has changed, if there is no room."""
        return self.put(<const u8*> PyBytes_AS_STRING(framed), <u64> PyBytes_GET_SIZE(framed),
                        count)

    def map(self, int fd, u64 nbytes):
        """Map the first bytes of a file, instead of what is mapped. Raises OSError."""
        cdef void* base
        self.unmap()
        base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
        if base == MAP_FAILED:
            raise OSError(errno, "mmap")
        self.base, self.mapped = <u8*> base, nbytes

    def unmap(self):
        """Leave the pages to the kernel. Afterwards there is no room."""
        self.room = 0
        if self.base != NULL:
            munmap(self.base, self.mapped)
        self.base = NULL
        self.mapped = 0


def framed(records):
    """Return records with their heads, one after another."""
    cdef bytes record
    cdef u64 total = 0, n
    for record in records:
        total += HEAD_BYTES + <u64> PyBytes_GET_SIZE(record)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> total)
    cdef u8* at = <u8*> PyBytes_AS_STRING(out)
    for record in records:
        n = <u64> PyBytes_GET_SIZE(record)
        memcpy(at + HEAD_BYTES, PyBytes_AS_STRING(record), n)
        head_of(at, at + HEAD_BYTES, n)
        at += HEAD_BYTES + n
    return out
