"""Models: the specification, one decoder, and what reads weights, tokenizers and configurations."""
