# Numbers that several models predict: reads them from the objects of a query, and averages them.
#
# Threads: any; those that take objects, with the GIL.
from clipper_core.learning.bandit cimport MODELS_MAX
from clipper_core.runtime.machine cimport u32, u8

cdef struct WeightedMean:
    double mean
    double agreement            # size / (size + spread) of the numbers; 1 if all are 0
    double arrived              # sum of the weights

# Return the mean of n numbers, all finite; of equal weights if the sum of the weights is 0.
cdef WeightedMean weighted_mean(const double* numbers, const double* weights,
                                u32 n) noexcept nogil
# Read the numbers of `models` from `predictions`, by model, into `values`, one for each model.
# arrived: set to 0 where there is none. Return how many there are; 0 if the predictions are not all
# finite numbers of these models, with a float among them.
cdef u32 numbers_read(tuple models, dict predictions, double* values, u8* arrived) except? 0
# Return those of the models, n in all, that arrived.
cdef tuple models_used(tuple models, const u8* arrived, u32 n)
