"""What clipper costs, beside what it is measured against. `python -m bench` lists the questions."""
