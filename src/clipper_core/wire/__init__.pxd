# Formats: bytes on sockets, and predictions in memory.
#
# May import: runtime.
#
# `codec` reads and writes the frames that servers and containers exchange (docs/wire.md): version 2
# with its feedback frames, and the seven message types of version 1; `lz4` compresses them.
# `prediction` is one prediction everywhere in the core (a word and a tag, or a reference-counted
# blob), and turns many of them into numpy arrays. `comparison` has which of them are equal, and how
# near numbers are. `record` packs and opens the named tensors of a row.
#
# Every reader treats its input as hostile: it checks a length before it uses it and returns
# BAD_FRAME if it is wrong.
#
# Threads: none of its own. The functions keep no state and may run on any thread.
