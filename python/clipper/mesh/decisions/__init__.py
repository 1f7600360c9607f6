"""Decisions of the mesh as pure functions of records, times and counts: no I/O, no clock."""
