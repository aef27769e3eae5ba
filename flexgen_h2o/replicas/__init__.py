"""Several copies of a model that share a job: on one machine or on many. No torch, and no Ray."""
