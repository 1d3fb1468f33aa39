# Finetunes OpenAI's GPT-2 on Shakespeare: a few minutes on a GPU.
#
#     python data/shakespeare/prepare.py
#     python train.py config/finetune_shakespeare.py
#     python sample.py --out_dir=out-shakespeare

out_dir = "out-shakespeare"
dataset = "shakespeare"
# 350M: weights, gradients and AdamW's moments take 5.7 GB; gpt2-xl's would take 25 GB
init_from = "gpt2-medium"

eval_interval = 5
eval_iters = 40
always_save_checkpoint = False  # the model soon overfits 300,000 tokens

batch_size = 1
gradient_accumulation_steps = 32  # 32,768 tokens per step; 9 steps are an epoch
max_iters = 20

learning_rate = 3e-5
decay_lr = False
