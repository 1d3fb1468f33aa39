# A card of 24 GB. Give this file after the file of a run:
#
#     python train.py config/train_fineweb_125m.py config/gpu_24gb.py
#
# It lowers or raises the micro-batch and keeps the tokens per step. 32 sequences of 1024 tokens need 13.5 GiB with 124M
# parameters in bfloat16, as --plan_for predicts for such a card. 64 would need 23.9 GiB, so this file has the same
# settings as gpu_16gb.py.

from config import split_step

batch_size, gradient_accumulation_steps = split_step(batch_size * gradient_accumulation_steps, largest=32)
