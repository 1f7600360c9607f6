"""Load for an application, and what it came to: `clipper bench` and `clipper profile`, and the pace
of the demo and of bench/."""
