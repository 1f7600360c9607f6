# The parameter server: embedding tables, and the shard that serves them.
#
# May import: runtime.
#
# `embedding` is a table as Python sees it. `embedding_rows` pulls and pushes rows from any number
# of threads: an index maps ids to rows, an arena allocates them, a lock guards one bucket of them.
# `optimizer` computes the first value of a row, and applies gradients.
#
# `shard_loop` is the loop of a shard, `shard_state` its state: tables, connections, memory shared
# with workers, changes that followers have not received, statistics and quotas of tables.
# `shard_connection` accepts connections, takes their messages, and pulls and pushes rows.
# `shard_stream` sends changes and pushes to followers as they come; `change_receiver` is their
# side.
# `row_parts` is a worker's side: distinct ids, and rows by shard.
#
# Threads: any number may use a table. The connections of a shard belong to the thread of its loop.
