# GPT-2's size on FineWeb-Edu with what made small models learn sooner: Muon, rotary positions, RMS norm of
# activations, queries and keys, squared ReLU, a head of its own, projections that begin as zero.
#
#     python data/fineweb_edu/prepare.py --pretokenized --tokens 1e9
#     python train.py config/train_fineweb_125m_fast.py        # other cards: config/gpu_8gb.py ... --auto_batch=True
#
# 162M parameters, of which the 39M of the token embedding multiply nothing: as many FLOPs per token as the 124M of
# config/train_fineweb_125m.py. Its activations at this micro-batch are predicted to take 4.3 GiB, those of GPT-2 2.7;
# compiling saves a quarter, if as much as in a small model (LOG.md). Learning rate and schedule have not been tuned on
# a GPU at this size yet.

out_dir = "out-fineweb-125m-fast"
dataset = "fineweb_edu"

eval_interval = 250
eval_tokens = 2**21  # the same 2048 windows of each split, whatever the micro-batch
log_interval = 10

n_layer = 12
n_head = 12  # of 64 channels
n_embd = 768
block_size = 1024
dropout = 0.0
bias = False
position = "rope"
norm = "rms"
qk_norm = True
activation = "relu2"
tie_weights = False
zero_init = True
token_shift = True

batch_size = 8  # sequences per micro-batch
gradient_accumulation_steps = 64  # x 8 x 1024 = 524,288 tokens per step

optimizer = "muon"
learning_rate = 2e-3
lr_schedule = "trapezoid"  # a run stopped before the decay can go on to another max_iters
min_lr = 0.0
max_iters = 5000  # 2.6B tokens
warmup_iters = 100
cooldown_iters = 1500
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
momentum = 0.95  # of Muon
grad_clip = 1.0

wandb_project = "fineweb-edu"
wandb_run_name = "gpt2-124M-fast"
