"""`python -m clipper` is `clipper`."""

from clipper.cli import main

if __name__ == "__main__":
    main(prog_name="clipper")
