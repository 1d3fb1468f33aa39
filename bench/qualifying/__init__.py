"""The stages of bench/qualify.py, one file each."""
