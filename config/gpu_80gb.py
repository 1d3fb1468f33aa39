# A card of 80 GB or more. Give this file after the file of a run:
#
#     python train.py config/train_fineweb_125m.py config/gpu_80gb.py
#
# It lowers or raises the micro-batch and keeps the tokens per step. 128 sequences of 1024 tokens need 45.6 GiB with
# 124M parameters in bfloat16, as --plan_for predicts for such a card.

from config import split_step

batch_size, gradient_accumulation_steps = split_step(batch_size * gradient_accumulation_steps, largest=128)
