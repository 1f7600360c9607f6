# Futures, and how a finished prediction reaches the code that waits for it.
#
# May import: runtime, wire.
#
# `completion` owns the result slots (256 per block) and notifies in three ways: it wakes blocked
# threads (futex), event loops and the callback thread (each by a `Mailbox`).
# `future` is the object that Python holds: one slot or many, by ticket. `ensemble_call` is one
# query on several models: predictions come in, one result goes out, by the rules of `decider`.
# `answer` is what a query to an application returns.
# The functions of concurrent.futures can wait for such a future.
#
# A slot has one writer at a time. Blocks are reference-counted; the last release frees them.
#
# Threads: slots are claimed and awaited on any thread; the engine's loop fills them.
