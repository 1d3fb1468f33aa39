# Finetunes a model on dialogues, so that it answers: GPT-2's smallest here, or a checkpoint of
# yours.
#
#     python data/chat/prepare.py dialogues.jsonl --name chat
#     python train.py config/finetune_chat.py
#     python sample.py --chat --out_dir=out-chat
#
# From a checkpoint, whose tokenizer and context the data must have (a small one learns more as
# docs/data.md says):
#
#     python data/chat/prepare.py dialogues.jsonl --name chat --tokenizer data/mine --block_size 256
#     python train.py config/finetune_chat.py --init_from=out-mine

out_dir = "out-chat"
dataset = "chat"
# 124M; gpt2-medium answers better and takes 5.7 GB for weights, gradients and AdamW's moments
init_from = "gpt2"

eval_interval = 20
eval_tokens = 64 * 1024  # the same ones with any micro-batch
always_save_checkpoint = False  # the model soon overfits a few thousand dialogues
patience = 3  # so end when the val loss no longer falls

batch_size = 4
# 32 windows per step; prepare.py says how many windows an epoch has
gradient_accumulation_steps = 8
max_iters = 200

learning_rate = 3e-5  # a twentieth of pretraining's, so that what was learned there stays
warmup_iters = 10
weight_decay = 0.0  # it would pull back to zero what pretraining has learned
