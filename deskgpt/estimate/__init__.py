"""What a run will need before it starts: memory, time, the micro-batch that fits.
Its figures come from rehearsals of model.py on tensors without storage, from published peaks and from known runs.
train.py asks it before a run and in a dry run; it changes nothing.
"""
