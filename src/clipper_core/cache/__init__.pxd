# The prediction cache.
#
# May import: runtime, wire.
#
# `clock_cache` maps the key of a row (model, salt, bytes) to a prediction. It is set-associative
# with CLOCK eviction: reads take no lock (sequence locks), writes lock one bucket. It also computes
# keys that similar float rows share, for approximate hits, and measures the error of these hits
# while it serves.
#
# The lock-free steps are templates in the .hpp files, so that tests/schedules can run them in every
# order of steps.
#
# Threads: none of its own. Lookups run on the threads of callers, inserts on the engine's loop.
