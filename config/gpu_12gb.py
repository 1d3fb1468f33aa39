# A card of 12 GB. Give this file after the file of a run:
#
#     python train.py config/train_fineweb_125m.py config/gpu_12gb.py
#
# It lowers or raises the micro-batch and keeps the tokens per step. 16 sequences of 1024 tokens need 7.9 GiB with 124M
# parameters in bfloat16, as --plan_for predicts for such a card.

from config import split_step

batch_size, gradient_accumulation_steps = split_step(batch_size * gradient_accumulation_steps, largest=16)
