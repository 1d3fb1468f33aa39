"""A run from its first line to its last: what it keeps, says and saves, when it stops, and how it goes on.
It owns the state that a checkpoint holds, the log, the lock on the folder and the signals.
train.py calls it; other scripts read its logs.
"""
