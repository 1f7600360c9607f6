"""The version of the package: that of clipper."""

VERSION = "0.1.0"
