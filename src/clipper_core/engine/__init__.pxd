# The engine as Python sees it, and its loop.
#
# May import: runtime, wire, cache, results, scheduling.
#
# `engine` owns the state, passes commands to the loop and reads the log of batches. `model` is the
# handle with which one model, or several at once, are queried; it checks and converts the input.
# `io_loop` owns the sockets of containers: it calls scheduler.step() and moves bytes.
#
# Threads: `io_loop` runs on one thread per engine and never takes the GIL; a caller that waits
# alone may run its turns instead (runtime/loop_owner). All else runs on the caller's thread.
