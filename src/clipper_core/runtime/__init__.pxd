# The lowest layer: memory, atomics, queues, histograms and status codes.
#
# May import: nothing.
#
# `machine` declares what Cython cannot express (aligned memory, futex, eventfd) and
# `allocation` allocates memory without exceptions. Above them lie the data structures that every
# other package uses: `ring` (lock-free queues), `timer_wheel`, `histogram`, the buffers of
# `byte_buffer`, the hash of a row, and `object_member`, which reads attributes of Python objects.
# `loop_owner` decides which thread runs a turn of the engine's loop; `reactor` is what the loops of
# containers, of HTTP and of shards share; `spin` decides how long a thread polls before it sleeps.
#
# The structures start no threads and read no clocks: time is an argument.
#
# Threads: none of its own. Each page says which functions any thread may call.
