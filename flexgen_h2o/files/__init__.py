"""Every writer and reader of text files, one module each. Torch-free."""
