# Decides which rows go to which container and when; has no input or output.
#
# May import: runtime, wire, cache, results.
#
# On the way down, `submit` and `offer` put a row into a `lane` (one queue per model) if `admission`
# estimates that its deadline can be met. `scheduler` takes the rows in, `demand` keeps the rows of
# a model, `replica set` (its replicas) and `batcher` choose batches, `cost_batch` their rows where
# these differ in cost, and `sending` writes their
# frames to a `connection` (the connection of a replica). On the way up, reply frames end tasks and
# fill result slots. `bulk` and `chunk` submit arrays, `asking` the later calls of an ensemble,
# `pending` finds an equal row that is being evaluated.
#
# Time and bytes are arguments: simulations run the same code on a virtual clock and network.
#
# Threads: submitting runs on the caller's thread, everything else on the engine's loop. They meet
# in the lanes and in the queues of commands and events.
