"""One figure of the Clipper paper (NSDI 2017) a module: `main(quick: bool) -> list[Row]`."""
