"""An HTTP server with OpenAI's interface: ``freewheel serve``."""
