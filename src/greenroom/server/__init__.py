"""An HTTP server with OpenAI's interface over an ``Engine``."""
