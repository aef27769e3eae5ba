"""Requests and results in the format of OpenAI's API, for a file of them or for a server."""
