# The arithmetic of policies and of models that learn online.
#
# May import: runtime, wire.
#
# `bandit` has the update rules of selection policies (Exp3, Exp4 and others) over rows of doubles.
# `mixture` weighs votes by a mixture of logistic regressions. `linear` has the linear models that
# predict how good each model is for a query. `class_evidence` reads the class probabilities that
# models report beside their labels, `number_votes` averages numbers. `feedback_update` applies one
# observation, or an array of them: losses, calibration, then the rule's step. `label_feedback` has
# the labels: it combines the votes of a query, keeps the pages to which the journal's records are
# copied, and does all that one label needs. `answer_window` has the answers that feedback may still
# come for.
# `policy_states` has the states in memory: immutable blocks, and the cells of the newest ones;
# `state_lock` is the lock of who changes them. `first_states` makes the state of users without an
# observation from a block of the shared one.
# `answer_counts` counts answers, by model, and how far models agree.
#
# The arithmetic has state come in and go out as numpy arrays, and keeps nothing between calls. The
# caller gives the seeds of random numbers.
#
# Threads: none of its own. Functions run on the caller's thread, with the GIL; blocks are read
# without it.
