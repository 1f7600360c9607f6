"""The settings of each section of the configuration file; `clipper.config` makes one Config of
them.
"""
