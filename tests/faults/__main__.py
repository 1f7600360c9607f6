"""`python -m tests.faults --write` writes docs/faults.md; without --write it says what is wrong
with the table."""

import sys

from tests.faults.table import PAGE, page, problems, read_all

if __name__ == "__main__":
    sections = read_all()
    if wrong := list(problems(sections)):
        sys.exit("\n".join(wrong))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(sections))
    elif not PAGE.exists() or PAGE.read_text() != page(sections):
        sys.exit(f"{PAGE.name} is out of date: python -m tests.faults --write")
