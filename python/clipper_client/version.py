"""The version of the package: that of clipper."""

VERSION = "0.2.0.dev0"
