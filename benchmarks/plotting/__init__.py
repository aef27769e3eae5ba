"""The parts of `plots.py`: the rows that it reads, and a module for each kind of figure."""
