"""What can be set, a module a section of the file: `clipper.config` makes one Config of it."""
