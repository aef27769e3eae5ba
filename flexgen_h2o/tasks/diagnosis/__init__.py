"""The parts of `doctor`: facts of a machine, and the sections that tell them."""
