# The answer of a policy that asks all models and votes on labels, from the objects of a query:
# read, weighed and calibrated in one call.
#
# Threads: any; the state belongs to the caller.
from clipper_core.learning.bandit cimport Rule


cdef class LabelVotes:
    cdef Rule rule
    cdef object bit_of
    cdef double doubt           # observations in a bin from which on they outweigh the confidence
