# A model of GPT-2's size on FineWeb-Edu with what made small models learn faster: Muon, rotary
# positions, RMS norm of embeddings, activations, queries and keys, squared ReLU, a separate output
# head, zero-initialised projections, token shift.
#
#     python data/fineweb_edu/prepare.py --tokens 1e9        # or download tokens: docs/data.md
#     python train.py config/train_fineweb_125m_fast.py
#
# Larger cards take a larger micro-batch by themselves.
#
# It has 162M parameters. The 39M of its token embedding take part in no multiplication, so a token
# takes as many FLOPs as with the 124M of config/train_fineweb_125m.py. It keeps more activations
# than GPT-2 does: --dry_run=True or --plan_for="RTX 4070" says how much memory it needs. The
# learning rate and the schedule are not yet tuned on a GPU at this size.

out_dir = "out-fineweb-125m-fast"
dataset = "fineweb_edu"

eval_interval = 250
eval_tokens = 2**21  # the same 2048 windows of each split, whatever the micro-batch
log_interval = 10

n_layer = 12
n_head = 12  # of 64 channels each
n_embd = 768
block_size = 1024
dropout = 0.0
bias = False
position = "rope"
norm = "rms"
qk_norm = True
embedding_norm = True  # lowers small models' loss by 0.123 and 0.219 (docs/answers.md#recipes)
activation = "relu2"
tie_weights = False
zero_init = True
# False: no model code of its own is needed to load it elsewhere (docs/export.md)
token_shift = True

batch_size = 8  # sequences per micro-batch
gradient_accumulation_steps = 64  # x 8 x 1024 = 524,288 tokens per step

optimizer = "muon"
learning_rate = 2e-3
lr_schedule = "trapezoid"  # a run stopped before the decay can resume with another max_iters
min_lr = 0.0
max_iters = 5000  # 2.6B tokens
warmup_iters = 100
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
momentum = 0.95  # Muon's
grad_clip = 1.0

wandb_project = "fineweb-edu"
wandb_run_name = "gpt2-124M-fast"
