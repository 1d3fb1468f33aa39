# GPT-2 (124M) on FineWeb-Edu, on one card of 12 GB: about two days for one epoch of the 10B-token sample.
#
#     python data/fineweb_edu/prepare.py                     # or, within minutes: --pretokenized --tokens 1e9
#     python train.py config/train_fineweb_125m.py           # other cards: put config/gpu_8gb.py ... behind it
#     python train.py config/train_fineweb_125m.py --dry_run=True
#
# What to expect: a known run with these sizes, batch and learning rate took 9.34 s per step on an RTX 4070, and reached
# a val loss of 4.385 at step 1000, 3.596 at step 4000 and 3.358 at step 10,000. Its schedule and its validation
# windows are not known: take the figures as about right. The earlier the learning rate decays, the lower the loss is
# at a given step.

out_dir = "out-fineweb-125m"
dataset = "fineweb_edu"

eval_interval = 500  # steps; with the 2 x 2M tokens below, less than one per cent of the time
eval_tokens = 2**21  # the same 2048 windows of each split, whatever the micro-batch
log_interval = 10

n_layer = 12
n_head = 12  # of 64 channels
n_embd = 768  # GPT-2's smallest: 123.6M parameters with the token embedding, which is also the head
block_size = 1024  # tokens of context, GPT-2's
dropout = 0.0  # every token is seen once: nothing to overfit
bias = False  # as nanoGPT: a little faster, no worse

batch_size = 8  # sequences per micro-batch
gradient_accumulation_steps = 64  # x 8 x 1024 = 524,288 tokens per step

learning_rate = 3e-4  # half of what GPT-3 took for this size: safe without tuning
max_iters = 18750  # 9.83B tokens: the sample's, once
warmup_iters = 700  # 0.37B tokens; AdamW's second moment is a poor estimate before
weight_decay = 1e-1  # of matrices and embeddings
beta1 = 0.9
beta2 = 0.95  # GPT-3's; 0.999 forgets too slowly for gradients that change
grad_clip = 1.0  # longest gradient norm, against single bad batches

wandb_project = "fineweb-edu"
wandb_run_name = "gpt2-124M"
