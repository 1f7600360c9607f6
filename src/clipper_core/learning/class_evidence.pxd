# Reads the class probabilities that models report beside their answers: qualifiers whose names are
# `p:` and the text of the label. They are the evidence of each model for each label of a query.
#
# Threads: any, with the GIL.
from cpython.object cimport PyObject

from clipper_core.learning.bandit cimport MODELS_MAX
from clipper_core.runtime.machine cimport u32, u8
from clipper_core.wire.comparison cimport ValueKey

cdef enum:
    LABELS_READ = 255           # largest number of labels of a query; there is space for the right
                                # one besides
    EVIDENCE_READ = 4096        # largest number of labels, with the right one, times models

cdef struct ClassEvidence:      # the labels of one query: those of votes, in the order of the
                                # models, then those that only class probabilities name
    double[EVIDENCE_READ] of    # [labels, k]: 0 to 1
    ValueKey[LABELS_READ + 1] label
    u8[LABELS_READ + 1] cells   # hashes, 0 to 63
    u32[MODELS_MAX] codes       # of the models' votes: the number of the label, from 1; 0 if there
                                # is no vote
    u32 labels
    u32 k

# Return whether there is a class probability among the qualifiers.
cdef bint reports_classes(object qualifiers) except -1
# Read the labels of k models and their class probabilities. Return False if there are too many
# labels, or an int has more than 64 bits. outputs, qualifiers: borrowed; outputs are of type
# `kind`, NULL where there is none.
cdef bint class_evidence_read(ClassEvidence* found, u32 k, PyObject** outputs,
                              PyObject** qualifiers, object kind) except -1
# Return the number of the right label; labels + 1, with a row of its own, if no model gave or named
# it; 0 if it has more than 64 bits.
cdef u32 class_evidence_code(ClassEvidence* found, object label, object kind) except? 0
