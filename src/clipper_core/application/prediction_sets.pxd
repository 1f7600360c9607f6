# Prediction sets: what else than the answer may be right, by the thresholds that feedback has
# adjusted. The reference, with the source of the method, is
# python/clipper/selection/learning/prediction_sets.py.
#
# Threads: any, with the GIL.
from clipper_core.application.selection cimport Combination, Outputs, Selection, StateView

# Return the set of an answer. state: by which it was combined.  thresholds: of that state.  answer:
# what was combined.
cdef tuple set_of(Selection selection, const StateView* state, const Outputs* outputs,
                  const Combination* found, object answer, object thresholds)
