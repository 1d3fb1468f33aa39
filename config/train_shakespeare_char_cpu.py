# A small character-level model for a machine without a GPU.
#
#     python data/shakespeare_char/prepare.py
#     python train.py config/train_shakespeare_char_cpu.py

out_dir = "out-shakespeare-char-cpu"
dataset = "shakespeare_char"

eval_interval = 250
eval_iters = 20  # 240 windows of each split, so that an evaluation takes a second, not a minute
log_interval = 10
always_save_checkpoint = False  # on so little data the last model is not always the best

# 0.80M parameters
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0  # 1.5 epochs are too few to overfit

batch_size = 12
block_size = 64  # characters
gradient_accumulation_steps = 1  # 768 tokens per step

learning_rate = 1e-3
max_iters = 2000
min_lr = 1e-4
warmup_iters = 100
beta2 = 0.99  # with few tokens per step the second moment is noisy: average it over more steps

compile = False  # compiling takes longer than it saves in a run of a minute
