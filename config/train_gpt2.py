# GPT-2 (124M) from scratch with the settings of nanoGPT's reproduction: days on 8 GPUs with 40 GB
# each.
#
#     torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
#
# Without torchrun, on one GPU, it is the same experiment and takes eight times as long. It needs
# OpenWebText as GPT-2 tokens in data/openwebtext (nanoGPT's token files work unchanged), or
# --dataset=another.

out_dir = "out-gpt2"
dataset = "openwebtext"

eval_interval = 1000
eval_iters = 200
log_interval = 10

# 124M parameters: 12 layers, 12 heads, 768 wide are the defaults
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8  # 491,520 tokens per step

learning_rate = 6e-4
max_iters = 600000  # 300B tokens
min_lr = 6e-5
warmup_iters = 2000
weight_decay = 1e-1

wandb_project = "owt"
wandb_run_name = "gpt2-124M"
