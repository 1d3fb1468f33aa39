"""What this machine is and offers: devices and their peaks, files, the terminal, and what was measured here before.
It owns everything that asks the system, and the words and numbers in which messages say it.
Everybody may call it; it knows torch and nothing of models or runs.
"""
