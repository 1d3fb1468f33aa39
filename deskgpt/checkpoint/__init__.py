"""Checkpoints on the disk: written so that a crash leaves a whole one, read without running code from them.
It owns the format of files and of folders of shards, and what of a checkpoint a run takes back.
Runs, sampling, exporting and benchmarks call it; `python -m deskgpt.checkpoint` makes a file of a folder.
"""
