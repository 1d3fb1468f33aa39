# GPT-2 (124M) on FineWeb-Edu, on one card of 12 GB: about two days for one epoch of the 10B-token
# sample.
#
#     python data/fineweb_edu/prepare.py                     # or download tokens: docs/data.md
#     python train.py config/train_fineweb_125m.py
#     python train.py config/train_fineweb_125m.py --dry_run=True
#     python train.py config/train_fineweb_125m.py --plan_for="RTX 4070"
#
# Larger cards take a larger micro-batch by themselves. The last two commands train nothing. They
# say whether the run fits into this machine, or into that card, and how long it would take.
#
# What to expect: a known run with these sizes, batch and learning rate took 9.34 s per step on an
# RTX 4070. It reached a val loss of 4.385 at step 1000, 3.596 at step 4000 and 3.358 at step
# 10,000. Its schedule and its validation windows are not known, so these figures are only a guide:
# the earlier the learning rate decays, the lower the loss is at a given step.

out_dir = "out-fineweb-125m"
dataset = "fineweb_edu"

eval_interval = 500  # steps; evaluating 2 x 2M tokens (below) then takes less than 1% of the time
eval_tokens = 2**21  # the same 2048 windows of each split, whatever the micro-batch
log_interval = 10

n_layer = 12
n_head = 12  # of 64 channels each
# The smallest GPT-2: 123.6M parameters, counting once the token embedding that is also the head.
n_embd = 768
block_size = 1024  # tokens of context, GPT-2's
dropout = 0.0  # the run sees every token once and cannot overfit
bias = False  # as in nanoGPT: a little faster, no worse

batch_size = 8  # sequences per micro-batch
gradient_accumulation_steps = 64  # x 8 x 1024 = 524,288 tokens per step

learning_rate = 3e-4  # half of what GPT-3 took for this size: safe without tuning
max_iters = 18750  # 9.83B tokens: one epoch of the sample
warmup_iters = 700  # 0.37B tokens; AdamW's second moment is a poor estimate until then
weight_decay = 1e-1  # on matrices and embeddings
beta1 = 0.9
beta2 = 0.95  # GPT-3's; 0.999 forgets too slowly for gradients that change
grad_clip = 1.0  # largest gradient norm, against single bad batches

wandb_project = "fineweb-edu"
wandb_run_name = "gpt2-124M"
