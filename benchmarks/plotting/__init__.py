"""What `plots.py` is made of: the rows that it reads, and a module for each kind of figure."""
