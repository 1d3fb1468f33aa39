"""Token files, tokenizers, and one folder per data set with its prepare.py."""
