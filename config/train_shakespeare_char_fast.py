# Shakespeare by characters: val loss 1.459 where nanoGPT's GPU run has 1.4697, in three minutes on two CPU cores with
# AMX (bench/results/2026-11-22-fast-180s.md); longer where bfloat16 has no instructions or there is no C++ compiler.
#
#     python data/shakespeare_char/prepare.py
#     python train.py config/train_shakespeare_char_fast.py
#     python train.py config/train_shakespeare_char_fast.py --n_layer=2 --max_iters=680 --learning_rate=8e-3 \
#       --norm=layer
#
# The second, fewer steps of half the layers, reaches 1.525 in a minute (bench/results/2026-11-22-fast-60s.md). It is
# too short to compile, and uncompiled `layer` is faster: torch has no kernel for the other norm on a CPU. The learning
# rate falls along the whole run: change max_iters rather than stop early.

out_dir = "out-shakespeare-char-fast"
dataset = "shakespeare_char"

eval_interval = 525
eval_tokens = 2**17  # the whole validation split, and as much of the other
log_interval = 20
always_save_checkpoint = False

# 3.2M parameters
n_layer = 4
n_head = 4
n_embd = 256
dropout = 0.0  # slow on a CPU, and these few epochs overfit little
position = "rope"  # worth most beside Muon
norm = "rms"
qk_norm = True
activation = "relu2"  # the fastest on a CPU
tie_weights = False
zero_init = True
token_shift = True

batch_size = 16
block_size = 128  # characters
gradient_accumulation_steps = 1  # 2048 tokens per step

optimizer = "muon"
learning_rate = 6e-3
lr_schedule = "linear"
min_lr = 0.0
max_iters = 1050
warmup_iters = 20
weight_decay = 0.1
beta2 = 0.99  # few tokens per step make the second moment noisy: average it over more steps
