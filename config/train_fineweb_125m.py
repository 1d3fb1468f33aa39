# GPT-2 (124M) on FineWeb-Edu, on one card of 12 GB: about two days for one epoch of the 10B-token sample.
#
#     python data/fineweb_edu/prepare.py                     # or, within minutes: --pretokenized --tokens 1e9
#     python train.py config/train_fineweb_125m.py           # other cards: put config/gpu_8gb.py ... behind it
#     python train.py config/train_fineweb_125m.py --dry_run=True
#
# What to expect: nanoGPT with this model, batch and learning rate took 9.34 s per step on an RTX 4070, and reached a
# val loss of 4.385 at step 1000, 3.596 at step 4000 and 3.358 at step 10,000, on its own validation windows. Its
# schedule is not known; the loss at a given step is lower the earlier the learning rate decays.

out_dir = "out-fineweb-125m"
dataset = "fineweb_edu"

eval_interval = 500  # steps; with the 2 x 2M tokens below, less than one per cent of the time
eval_tokens = 2**21  # the same 2048 windows of each split, whatever the micro-batch
log_interval = 10

n_layer = 12
n_head = 12  # of 64 channels
n_embd = 768  # 123.6M parameters with the token embedding, which is also the head
block_size = 1024
dropout = 0.0  # every token is seen once: nothing to overfit
bias = False

batch_size = 8  # sequences per micro-batch
gradient_accumulation_steps = 64  # x 8 x 1024 = 524,288 tokens per step

learning_rate = 3e-4  # half of GPT-3's for this size: safe without tuning
max_iters = 19000  # 9.96B tokens: the sample once
warmup_iters = 700  # 0.37B tokens
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0

wandb_project = "fineweb-edu"
wandb_run_name = "gpt2-124M"
