# What a worker does with ids and rows before it sends them, and after they came: each id once, and
# rows by shard.
#
# Threads: any; the arrays belong to the caller.
