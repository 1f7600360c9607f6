"""One question a module: `main(quick: bool) -> list[Row]`."""
