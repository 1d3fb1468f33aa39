# A card of 8 GB. Give this file after the file of a run:
#
#     python train.py config/train_fineweb_125m.py config/gpu_8gb.py
#
# It lowers or raises the micro-batch and keeps the tokens per step. 8 sequences of 1024 tokens need 5.3 GiB with 124M
# parameters in bfloat16, as --plan_for predicts for such a card.

from config import split_step

batch_size, gradient_accumulation_steps = split_step(batch_size * gradient_accumulation_steps, largest=8)
