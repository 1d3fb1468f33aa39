"""Models in other programs' formats: Hugging Face's folders, which can be read back, and llama.cpp's GGUF files."""
