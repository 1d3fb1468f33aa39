"""Faster forms of what model.py defines, and what holds them to it.
A form here stands in for a function of model.py while a run uses it; whoever computes something else is left out.
model.py asks for these forms by name, and `compute` chooses among them; nothing here knows settings, data or runs.
"""
