# Feedback about labels, read from the objects of queries: records of the journal, accuracy, and the
# steps of a label, or a list of them, from the answer it is about to the learned state. Unlike the
# rest of this package it holds the states' lock for that.
#
# Threads: any, with the GIL.
