# A model that answers questions after ten minutes on two CPU cores, from nothing: make chat.
# data/chat/exercises.py makes what it learns.

out_dir = "out-exercises"
dataset = "exercises"
eval_interval = 250
eval_tokens = 32000
eval_answers = True
log_interval = 50
n_layer = 4
n_head = 4
n_embd = 256
dropout = 0.0
position = "rope"
norm = "rms"
qk_norm = True
activation = "relu2"
tie_weights = False
zero_init = True
batch_size = 12
block_size = 160
gradient_accumulation_steps = 1
optimizer = "muon"
learning_rate = 6e-3
lr_schedule = "linear"
min_lr = 0.0
max_iters = 4000
max_minutes = 9
warmup_iters = 20
weight_decay = 0.1
beta2 = 0.99
