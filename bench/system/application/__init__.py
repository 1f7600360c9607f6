"""The benchmark of what a query to an application costs, beside the same query to its model."""
