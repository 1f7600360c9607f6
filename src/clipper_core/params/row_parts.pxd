# Functions of a worker for ids and rows: distinct ids, and the distribution of ids and rows over
# shards.
#
# Threads: any; the arrays belong to the caller.
