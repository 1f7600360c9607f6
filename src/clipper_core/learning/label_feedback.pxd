# Feedback about labels, read from the objects of queries: records of the journal, columns of lists,
# accuracy, and the steps of one label from its record to the learned state. Unlike the rest of this
# package it holds the states' lock for that.
#
# Threads: any, with the GIL.
