"""Models of other frameworks as a `Model`, and targets as objects."""
