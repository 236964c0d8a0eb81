"""The error of everything that concerns model files."""


class ModelError(RuntimeError):
    """A model cannot be found, fetched, read or run; the message is one sentence for users and names the file."""
