# The key of a row: 120 bits of a seeded hash over model, salt and bytes. The steps are
# row_hash.hpp.
#
# Threads: any. The secret is made once per process from a random seed, so that a client cannot
# choose rows that fall into one bucket.
from clipper_core.runtime.machine cimport u64, u8

cdef extern from "runtime/row_hash.hpp" namespace "clipper" nogil:
    cdef struct Key:
        u64 lo              # never 0 in a key
        u64 hi              # of a key: low 56 bits; the top byte is 0 (a bucket keeps the value's
                            # tag there)
    cdef cppclass HashSecret:
        pass
    cdef enum Variant:          # CPU instructions to use; results are equal, except hashes of long
                                # rows
        PLAIN "clipper::kPlain"
        AVX2 "clipper::kAvx2"
        AVX512 "clipper::kAvx512"
    Variant variant_best() noexcept
    void hash_secret(HashSecret* secret, u64 seed_lo, u64 seed_hi, Variant variant) noexcept
    # The hash of a row's bytes, and its key for a model.
    Key hash_bytes(const HashSecret& secret, const u8* row, u64 nbytes) noexcept
    Key hash_hashed(const HashSecret& secret, u64 model, u64 salt, Key hashed, u64 nbytes) noexcept
