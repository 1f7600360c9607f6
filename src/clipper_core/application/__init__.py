"""A query to an application: from its arguments to its answer."""
