"""Model files: formats, the `ModelSpec` that describes a decoder, tokenizers, templates."""
