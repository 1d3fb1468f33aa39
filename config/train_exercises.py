# A model that answers questions after ten minutes on two CPU cores, from nothing: make chat.
# data/chat/exercises.py makes what it learns; bench/results/2026-11-29-chat.md has what
# it came to know.

out_dir = "out-exercises"
dataset = "exercises"
eval_interval = 500
eval_tokens = 32000  # about 500 answers of val
eval_answers = True
log_interval = 50

# 0.85M parameters. It learns to copy, to look up and to compare, not facts, and a small model takes
# many steps: 0.155 s of one core for 2,560 tokens, where 256 wide took 0.4 s for 1,920.
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0  # hardly any dialogue comes twice
position = "rope"  # to find the next letter is to look at a place before this one
norm = "rms"
qk_norm = True
activation = "relu2"  # with rms and qk_norm as in config/train_shakespeare_char_fast.py
tie_weights = False  # 256 bytes take little memory
zero_init = True

batch_size = 16  # 2,560 tokens, in which there are some 40 dialogues
block_size = 160  # that of the prepared windows; no exercise is longer
gradient_accumulation_steps = 1

optimizer = "muon"  # few steps: docs/answers.md#recipes
learning_rate = 1e-2  # the first that was tried: no spike, and it learned
lr_schedule = "linear"
min_lr = 0.0
# As many as an EPYC's two idle cores took in 8m15; the data last for one pass.
max_iters = 6000
max_minutes = 8.5  # and leaves a minute for making the data and for the table
warmup_iters = 20
weight_decay = 0.1
beta2 = 0.99
