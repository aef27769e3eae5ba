"""Jobs done with the engine, one command each: ``python -m flexgen_h2o.NAME``."""
