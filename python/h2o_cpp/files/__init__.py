"""Model files: finding, downloading and reading them, and their tokenizers."""
