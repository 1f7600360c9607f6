"""Client of the shards of a parameter server: messages, connections, push numbers, shared memory.

`clipper_container.tables.Tables` is the client of a container, `clipper.params.Client` that of the
server and of workers; both are built of these parts.
"""
