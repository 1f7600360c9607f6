"""Client of the shards of a parameter server: messages, push numbers, shared memory.

The public class is `clipper_container.tables.Tables`.
"""
