"""Load tests: open-loop generation, measurement and reports. Used by `clipper bench`, `clipper
demo` and the benchmarks.
"""
