"""What this machine is and offers: devices and their peaks, memory, files, the terminal, what was measured here before.
It owns everything that asks the system, what a setting may be, and how messages write numbers and errors.
Everybody may call it; it knows torch and nothing of models or runs.
"""
