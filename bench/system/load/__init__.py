"""Benchmarks of one server under load: deadlines, overload, a first burst, an upgrade, MLPerf."""
