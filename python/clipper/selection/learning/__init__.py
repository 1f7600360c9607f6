"""Learning from feedback: the state of a policy, its calibration and its evaluation."""
