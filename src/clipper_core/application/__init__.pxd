# Queries to applications: from their arguments to their answers, for the built-in policies.
#
# May import: runtime, wire, cache, learning, results, scheduling, engine.
#
# `application` has the path of a query: the policy's choice, the look-up in the cache, the tasks
# for what is not there, the combination, the counts and the entry for feedback. `selection` has the
# policies as data: which model they choose, and how the outputs of models combine. `deciding` has
# the answers of deciders by the predictions that have arrived. `roles` decides which queries
# challengers answer and observers see. `prediction_sets` has what else may be right. `output_means`
# has the running means that stand for numbers which are missing at a deadline.
#
# Threads: none of its own. Functions run on the caller's thread, with the GIL.
