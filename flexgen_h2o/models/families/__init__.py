"""One readable file a model family: how its config.json is read, its tensors, its functions.

None of them imports torch: the memory plan reads a model's sizes off the tables of tensors.
"""
