"""How a model computes on this machine: ranks, batches, precision, compiling, optimizers, and the choice of a form.
What it trains or samples with has been compared with the definition in model.py.
train.py, sample.py and the rooms above call it; it saves nothing and reads no data.
"""
