# A character-level model of Shakespeare that took 136 s of steps to a val loss of 1.4700 on two CPU
# cores with AMX, not compiled (bench/results/2026-11-26-speed-amx.md). nanoGPT quotes 1.4697 for
# its run on a GPU. It takes longer on a processor without bfloat16 instructions or without a C++
# compiler.
#
#     python data/shakespeare_char/prepare.py
#     python train.py config/train_shakespeare_char_fast.py
#     python train.py config/train_shakespeare_char_fast.py --n_layer=2 --max_iters=680 \
#       --learning_rate=8e-3 --norm=layer
#
# The second run takes fewer steps of half the layers: there it reached 1.5290 after 39.9 s of steps
# (the same page). It is too short for compiling to pay. --norm=layer was faster then, because torch
# has no RMS norm kernel for a CPU; deskgpt/cpu_kernels.cpp has one now. The learning rate falls
# over the whole run, so set a smaller max_iters instead of stopping early.

out_dir = "out-shakespeare-char-fast"
dataset = "shakespeare_char"

eval_interval = 525
eval_tokens = 2**17  # the whole validation split, and as many tokens of the training split
log_interval = 20
always_save_checkpoint = False

# 3.2M parameters
n_layer = 4
n_head = 4
n_embd = 256
dropout = 0.0  # dropout is slow on a CPU, and two epochs overfit little
position = "rope"  # without it the loss is 0.075 higher (bench/results/2026-11-21-ablation.md)
norm = "rms"
qk_norm = True
activation = "relu2"  # the fastest activation on a CPU
tie_weights = False
zero_init = True
# Lowers the loss by 0.05 (bench/results/2026-11-22-token-shift.md), but see docs/export.md.
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
beta2 = 0.99  # with few tokens per step the second moment is noisy: average it over more steps
