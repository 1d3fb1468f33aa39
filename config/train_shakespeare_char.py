# A character-level model of Shakespeare for one GPU: minutes on a current card.
#
#     python data/shakespeare_char/prepare.py
#     python train.py config/train_shakespeare_char.py

out_dir = "out-shakespeare-char"
dataset = "shakespeare_char"

eval_interval = 250  # often, because the model soon memorises this data
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # keep the model from before it overfits

# 10.65M parameters
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

batch_size = 64
block_size = 256  # characters
gradient_accumulation_steps = 1  # 16,384 tokens per step; 5000 steps are 82 epochs

learning_rate = 1e-3  # small models tolerate higher rates than large ones
max_iters = 5000
min_lr = 1e-4
warmup_iters = 100
beta2 = 0.99  # with few tokens per step the second moment is noisy: average it over more steps
