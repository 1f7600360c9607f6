"""From a query to its answer: the engine and its containers below, applications above."""
