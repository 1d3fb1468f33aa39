# A card of 24 GB, given behind the file of a run:
#
#     python train.py config/train_fineweb_125m.py config/gpu_24gb.py
#
# Sets the micro-batch, and the accumulation such that the tokens per step stay those of the run. 32 sequences of
# 1024 tokens need 13.0 GiB with 124M parameters in bfloat16, as --dry_run=True predicts; 64 would need 23.5, so these
# are the settings of gpu_16gb.py.

from math import gcd

_sequences = batch_size * gradient_accumulation_steps  # per step, of the run
batch_size = gcd(_sequences, 32)
gradient_accumulation_steps = _sequences // batch_size
