"""What a run will need before it starts: memory, time, traffic, the micro-batch that fits.
Its figures come from rehearsals of model.py on tensors without storage, and from published or measured peaks.
train.py asks it before a run and in a dry run; it changes nothing.
"""
