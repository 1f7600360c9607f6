# Formats: bytes on sockets, and predictions in memory.
#
# May import: runtime.
#
# `codec` reads and writes the frames that servers and containers exchange (docs/wire.md), `v1` the
# seven message types of the design document; `lz4` and `crc` serve both. `prediction` is one
# prediction everywhere in the core: a word and a tag, or a reference-counted blob. `column` turns
# predictions into numpy arrays, `correction` reads the replies to feedback of models that learn
# online.
#
# Every reader treats its input as hostile: it checks a length before it uses it and returns
# BAD_FRAME if it is wrong.
#
# Threads: none of its own. The functions keep no state and may run on any thread.
