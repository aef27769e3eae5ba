"""An HTTP server with the Files, Batch and completion endpoints of OpenAI's API."""
