# The smaller companion of train_fineweb_125m.py: 40M parameters, a first look at FineWeb-Edu on a
# card of 12 GB.
#
#     python data/fineweb_edu/prepare.py --tokens 3e9        # or download tokens: docs/data.md
#     python train.py config/train_fineweb_40m.py
#
# What to expect: a known run with this width, depth, batch and learning rate took 3.9 s per step on
# an RTX 4070. It reached a val loss of 4.459 at step 1000 and 3.657 at step 10,000. The caution in
# train_fineweb_125m.py applies here too.

out_dir = "out-fineweb-40m"
dataset = "fineweb_edu"

eval_interval = 500
eval_tokens = 2**21  # as in train_fineweb_125m.py, so that the losses can be compared
log_interval = 10

n_layer = 12
n_head = 6  # of 64 channels each; the number of heads of the known run is not recorded
n_embd = 384  # 40.6M parameters, nearly half of them the token embedding
block_size = 1024
dropout = 0.0
bias = False

batch_size = 16
gradient_accumulation_steps = 32  # 524,288 tokens per step, the same as with 8 x 64

learning_rate = 1e-3  # narrower models tolerate and need a higher rate
max_iters = 10000  # 5.2B tokens
warmup_iters = 700
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0

wandb_project = "fineweb-edu"
wandb_run_name = "gpt-40M"
