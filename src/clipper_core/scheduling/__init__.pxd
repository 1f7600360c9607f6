# Decides which rows go to which container and when; has no input or output.
#
# May import: runtime, wire, cache, results.
#
# On the way down, `submit` puts a row, or the rows of an array, into a `lane` (one queue per model,
# band and class of SLO) if `admission` estimates that its deadline can be met. A row that equals
# one in flight joins it. `scheduler` takes the rows in. `model_state` has the lanes and replicas of
# a model: it chooses the replica, and the rows where these differ in cost; `bands` says whose row
# goes next, and `batcher` how many go. `replica` writes a batch to its `container_connection`. On
# the way up, it reads the reply and fills the result slots. `deferred_calls` makes the later calls
# of an ensemble.
#
# Time and bytes are arguments: simulations run the same code on a virtual clock and network.
#
# Threads: submitting runs on the caller's thread, everything else on the engine's loop. They meet
# in the lanes and in the queues of commands and events.
