# Feedback about labels, read from the objects of queries: records, columns and accuracy.
#
# Threads: any, with the GIL; nothing is kept.
