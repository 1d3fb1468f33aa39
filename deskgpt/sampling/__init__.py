"""Trained models and their tokenizers; samples during training."""
